/* Noise on sums: see noise/native.py. */

#define HALF 256
#define GROUP 512
#define UNIT 5.9604644775390625e-08f /* e = 2^-24 */

INLINE float bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* -ln q for 0 < q <= 1, to one unit in the last place (the series of FreeBSD's e_logf.c). */
INLINE float minus_log(float q)
{
    uint32_t bits = float_to_bits(q) - 0x3f3504f3u;
    float k = (float)((int32_t)bits >> 23);
    float f = bits_to_float((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    float s = f / (2.0f + f), z = s * s, w = z * z;
    float r = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
    float half = 0.5f * f * f;
    return -(s * (half + r) + k * 9.0580006145e-06f - half + f + k * 0.69313812256f);
}

/* What is the same for all numbers: a = sqrt(2)*sigma/grid, the radii and sums for which the bound on the error of
float32 holds, and how sums are turned into units of the grid and back. */
typedef struct {
    float a, least, most, most_sum, per_grid, divisor;
} Scale;

/* One group: 256 words for radii, 256 for angles, 512 sums -> round(sum/grid + a*z)/divisor in their place. Marks those
that float32 does not decide: the error of x is at most e*(a*(1/R + 16 R) + |x|), see noise/grid.py. */
INLINE void release_group_body(const int64_t *words, float *sums, uint8_t *again, const Scale *scale)
{
    float radius[HALF], tolerance[HALF], x[GROUP];
    for (int k = 0; k < HALF; k++) {
        int32_t high = (int32_t)(words[k] >> 32);
        float low = (float)((int32_t)((uint32_t)words[k] >> 1));
        float q = fabsf((float)high * 0x1p-31f + low * 0x1p-62f);
        q = q > 0x1p-40f ? q : 0x1p-40f; /* so rare a radius is computed again */
        float r = sqrtf(minus_log(q));
        int odd = !((r >= scale->least) & (r <= scale->most));
        radius[k] = scale->a * r;
        tolerance[k] = odd ? 1.0f : 1.05f * UNIT * scale->a * (1.0f / r + 16.0f * r); /* one: never decided */
    }
    for (int k = 0; k < HALF; k++) {
        uint32_t phase = (uint32_t)(words[HALF + k] >> 32);
        uint32_t quarter = (phase + 0x20000000u) >> 30;
        float t = (float)(int32_t)(phase - (quarter << 30)) * 1.46291807926715968e-09f; /* 2 pi / 2^32 */
        float z = t * t;
        float sine = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * t + t;
        float cosine = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
                       0.5f * z + 1.0f;
        float c = quarter & 1 ? sine : cosine, s = quarter & 1 ? cosine : sine;
        x[k] = radius[k] * ((quarter + 1) & 2 ? -c : c);
        x[HALF + k] = radius[k] * (quarter & 2 ? -s : s);
    }
    for (int half = 0; half < GROUP; half += HALF)
        for (int k = 0; k < HALF; k++) {
            float sum = sums[half + k] * scale->per_grid, y = x[half + k] + sum;
            float whole = rintf(y), away = fabsf(y - whole);
            float sure = 0.5f - tolerance[k] - 1.05f * UNIT * fabsf(y);
            uint8_t undecided = !((away < sure) & (fabsf(sum) <= scale->most_sum));
            again[half + k] = undecided;
            sums[half + k] = undecided ? sums[half + k] : whole / scale->divisor; /* as it was, to be computed again */
        }
}

/* Sums in pieces of memory one behind the other, and how far one has come. */
typedef struct {
    float *const *pieces;
    const int64_t *counts;
    int64_t piece, at;
} Sums;

/* Copies the next numbers into `room`, or out of it. */
INLINE void copy_sums(const Sums *sums, float *room, int64_t count, int out)
{
    int64_t piece = sums->piece, at = sums->at;
    for (int64_t done = 0; done < count; piece++, at = 0) {
        int64_t some = sums->counts[piece] - at < count - done ? sums->counts[piece] - at : count - done;
        float *here = sums->pieces[piece] + at;
        memcpy(out ? here : room + done, out ? room + done : here, some * sizeof(float));
        done += some;
    }
}

INLINE void go_on(Sums *sums, int64_t count)
{
    for (sums->at += count; sums->at > 0 && sums->at >= sums->counts[sums->piece];)
        sums->at -= sums->counts[sums->piece++];
}

/* What float32 does not decide: places, words and the sums themselves, which are left as they are. */
typedef struct {
    int64_t *places, *radii, *angles, found;
    float *values;
} Undecided;

/* Numbers from `first` of the words on for the next `count` sums, of which `begin` were before. */
INLINE void release_body(const int64_t *words, int64_t first, Sums *sums, int64_t begin, int64_t count,
                         const Scale *scale, Undecided *left)
{
    uint8_t again[GROUP];
    float room[GROUP];
    for (int64_t done = 0; done < count;) {
        int64_t skip = (first + done) % GROUP, some = GROUP - skip < count - done ? GROUP - skip : count - done;
        const int64_t *group = words + (first + done - skip);
        int whole = some == GROUP && sums->counts[sums->piece] - sums->at >= GROUP;
        float *here = whole ? sums->pieces[sums->piece] + sums->at : room;
        if (!whole) { /* a part of a group: the other numbers are made, and left; or pieces that share one */
            memset(room, 0, sizeof room);
            copy_sums(sums, room + skip, some, 0);
        }
        release_group_body(group, here, again, scale);
        if (!whole) {
            copy_sums(sums, room + skip, some, 1);
            memset(again, 0, skip);
            memset(again + skip + some, 0, GROUP - skip - some);
        }
        for (int k = 0; k < GROUP; k += 8) {
            uint64_t eight;
            memcpy(&eight, again + k, 8);
            if (eight)
                for (int i = k; i < k + 8; i++)
                    if (again[i]) {
                        left->places[left->found] = begin + done + i - skip;
                        left->radii[left->found] = group[i % HALF];
                        left->angles[left->found] = group[HALF + i % HALF];
                        left->values[left->found++] = here[i];
                    }
        }
        done += some;
        go_on(sums, some);
    }
}

COMPILED(release,
         (const int64_t *words, int64_t first, Sums *sums, int64_t begin, int64_t count, const Scale *scale,
          Undecided *left),
         (words, first, sums, begin, count, scale, left))

/* release(words, pieces, again, values, first, begin, limits ...) -> (how many are undecided, how many were done) */
static PyObject *py_release(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 12, "release"))
        return NULL;
    double number[6];
    for (int n = 0; n < 6; n++) {
        number[n] = PyFloat_AsDouble(args[6 + n]);
        if (number[n] == -1.0 && PyErr_Occurred())
            return NULL;
    }
    int64_t first = PyLong_AsLongLong(args[4]), begin = PyLong_AsLongLong(args[5]), *counts;
    if (PyErr_Occurred())
        return NULL;
    float **pieces;
    int64_t total = open_pieces(args[1], &pieces, &counts);
    if (total < 0)
        return NULL;
    PyObject *arrays[] = {args[0], args[2], args[3]}, *said = NULL;
    Py_buffer view[3];
    if (open_arrays(arrays, view, "qQF") == 0) {
        int64_t words = view[0].len / 8, room = view[1].len / 24;
        int wrong = first < 0 || words % GROUP || first > words || begin < 0 || begin > total;
        int64_t some = wrong ? 0 : words - first < total - begin ? words - first : total - begin;
        if (wrong || room < some || view[2].len / 4 < some)
            PyErr_SetString(PyExc_ValueError, "not as many words, in whole groups, and places as sums");
        else {
            Scale scale = {(float)number[0], (float)number[1], (float)number[2],
                           (float)number[3], (float)number[4], (float)number[5]};
            int64_t *places = view[1].buf;
            Undecided left = {places, places + room, places + 2 * room, 0, view[2].buf};
            Sums sums = {pieces, counts, 0, 0};
            Py_BEGIN_ALLOW_THREADS
            if (some)
                go_on(&sums, begin);
            release(view[0].buf, first, &sums, begin, some, &scale, &left);
            Py_END_ALLOW_THREADS
            said = Py_BuildValue("(LL)", (long long)left.found, (long long)some);
        }
        close_arrays(view, 3);
    }
    PyMem_Free(pieces);
    PyMem_Free(counts);
    return said;
}

/* put(pieces, places, values): numbers at some places, in order. */
static PyObject *py_put(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 3, "put"))
        return NULL;
    float **pieces;
    int64_t *counts, total = open_pieces(args[0], &pieces, &counts), before = 0, piece = 0;
    if (total < 0)
        return NULL;
    Py_buffer view[2];
    int failed = open_arrays(args + 1, view, "qf") < 0;
    if (!failed) {
        const int64_t *places = view[0].buf;
        const float *values = view[1].buf;
        int64_t many = view[0].len / 8;
        failed = view[1].len / 4 != many;
        for (int64_t n = 0; !failed && n < many; n++)
            failed = places[n] < (n ? places[n - 1] : 0) || places[n] >= total;
        if (failed)
            PyErr_SetString(PyExc_ValueError, "places are not in order, or there are no such places");
        for (int64_t n = 0; !failed && n < many; n++) {
            while (places[n] - before >= counts[piece])
                before += counts[piece++];
            pieces[piece][places[n] - before] = values[n];
        }
        close_arrays(view, 2);
    }
    PyMem_Free(pieces);
    PyMem_Free(counts);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
