/* Passes over memory that NumPy and torch take several for: noise, hashes, sums of bits, squares of rows.

Every function here has a twin in Python that gives the same (noise/grid.py, noise/fingerprint.py,
clipping/bits.py) or as exact numbers (clipping/rounding.py), and kernels/native.py says whether this one is there. Where
no compiler is, the twins do the work. Nothing secret is kept here, and nothing is drawn: random words come from OpenSSL.

Loops are plain, so that compilers turn them into vector instructions; each is compiled for three kinds of x86
processors and chosen when the module is loaded. Elsewhere there is one.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define ALONE __attribute__((noinline))
#else
#define ALONE __attribute__((noinline, noclone))
#endif
#define FETCH(place) __builtin_prefetch(place)
#else
#define INLINE static inline
#define FETCH(place) ((void)0)
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TARGETS 1
#define V4 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")))
#define V3 __attribute__((target("avx2,fma,bmi,bmi2")))
#else
#define TARGETS 0
#endif

/* Defines NAME, which calls the body compiled for this processor. */
#if TARGETS
static int level = 0; /* 2: AVX-512, 1: AVX2, 0: neither */
#define COMPILED(NAME, PARAMETERS, ARGUMENTS)                                                                          \
    V4 static void NAME##_v4 PARAMETERS { NAME##_body ARGUMENTS; }                                                     \
    V3 static void NAME##_v3 PARAMETERS { NAME##_body ARGUMENTS; }                                                     \
    static void NAME##_v1 PARAMETERS { NAME##_body ARGUMENTS; }                                                        \
    static void NAME PARAMETERS                                                                                        \
    {                                                                                                                  \
        if (level == 2)                                                                                                \
            NAME##_v4 ARGUMENTS;                                                                                       \
        else if (level == 1)                                                                                           \
            NAME##_v3 ARGUMENTS;                                                                                       \
        else                                                                                                           \
            NAME##_v1 ARGUMENTS;                                                                                       \
    }
#else
#define COMPILED(NAME, PARAMETERS, ARGUMENTS)                                                                          \
    static void NAME PARAMETERS { NAME##_body ARGUMENTS; }
#endif

/* -- noise ------------------------------------------------------------------------------------------------------ */

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

/* -- hashes ----------------------------------------------------------------------------------------------------- */

/* NH of one row under one key: the sum of products of two keyed words each, the upper one signed, modulo 2^64. */
INLINE void hash_row_body(const uint32_t *words, const uint32_t *keys, int64_t count, uint64_t *hash)
{
    uint64_t total = 0;
    for (int64_t j = 0; j < count; j += 2) {
        uint64_t low = (uint32_t)(words[j] + keys[j]), high = (uint32_t)(words[j + 1] + keys[j + 1]);
        total += low * high - ((high >> 31) * low << 32);
    }
    *hash = total;
}

#if TARGETS
/* AVX2 has a product of 32 bits, which compilers do not find in one of 64. */
V3 static void hash_row_v3(const uint32_t *words, const uint32_t *keys, int64_t count, uint64_t *hash)
{
    __m256i sums = _mm256_setzero_si256();
    uint64_t parts[4], rest = 0;
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) {
        __m256i keyed = _mm256_add_epi32(_mm256_loadu_si256((const __m256i *)(words + j)),
                                         _mm256_loadu_si256((const __m256i *)(keys + j)));
        __m256i high = _mm256_srli_epi64(keyed, 32);
        __m256i negative = _mm256_srli_epi64(_mm256_srai_epi32(keyed, 31), 32); /* where the upper word is */
        sums = _mm256_add_epi64(sums, _mm256_mul_epu32(keyed, high));
        sums = _mm256_sub_epi64(sums, _mm256_slli_epi64(_mm256_and_si256(keyed, negative), 32));
    }
    if (j < count)
        hash_row_body(words + j, keys + j, count - j, &rest);
    _mm256_storeu_si256((__m256i *)parts, sums);
    *hash = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + rest;
}

V4 static void hash_row_v4(const uint32_t *words, const uint32_t *keys, int64_t count, uint64_t *hash)
{
    hash_row_body(words, keys, count, hash);
}
#endif

static void hash_row(const uint32_t *words, const uint32_t *keys, int64_t count, uint64_t *hash)
{
#if TARGETS
    if (level == 2)
        hash_row_v4(words, keys, count, hash);
    else if (level == 1)
        hash_row_v3(words, keys, count, hash);
    else
#endif
        hash_row_body(words, keys, count, hash);
}

/* -- sums of bits ----------------------------------------------------------------------------------------------- */

#define BLOCK_OF_WORDS 16 /* words that are read at once */
#define EXPONENT 0x7f800000u
#define FIRST_KEY(i) ((uint32_t)((i) + 1) * 0x9e3779b9u)
#define KEY_STEP(i) ((uint32_t)(2 * (i) + 1) * 0x85ebca6bu)
#if defined(__GNUC__)
typedef uint64_t Pairs __attribute__((vector_size(4 * BLOCK_OF_WORDS)));
typedef uint32_t Words __attribute__((vector_size(4 * BLOCK_OF_WORDS)));
#endif

/* What a sum of words has seen so far. Each word has a key, which depends on its place, and is multiplied by the word
beside it (NH of UMAC): a product of two numbers that change is no sum in which changes of equal size cancel, and words
that change places meet other keys. */
typedef struct {
#if defined(__GNUC__)
    Words keys, steps, infinite;
    Pairs sums;
#else
    uint32_t keys[BLOCK_OF_WORDS], steps[BLOCK_OF_WORDS], infinite;
    uint64_t sums;
#endif
} WordSum;

INLINE void add_block(WordSum *sum, const uint32_t *words)
{
#if defined(__GNUC__)
    Words block, keyed;
    memcpy(&block, words, sizeof(block));
    keyed = block + sum->keys;
    sum->keys += sum->steps;
    sum->sums += ((Pairs)keyed & 0xffffffffu) * ((Pairs)keyed >> 32);
    sum->infinite |= (Words)((block & EXPONENT) == EXPONENT);
#else
    for (int i = 0; i < BLOCK_OF_WORDS; i += 2)
        sum->sums += (uint64_t)(uint32_t)(words[i] + sum->keys[i]) * (uint32_t)(words[i + 1] + sum->keys[i + 1]);
    for (int i = 0; i < BLOCK_OF_WORDS; i++) {
        sum->keys[i] += sum->steps[i];
        sum->infinite |= (uint32_t)((words[i] & EXPONENT) == EXPONENT);
    }
#endif
}

INLINE void sum_words_body(const uint32_t *words, int64_t count, int64_t *total, int *finite)
{
    WordSum sum = {0};
    uint64_t sums = 0;
    uint32_t last[BLOCK_OF_WORDS] = {0}, infinite = 0;
    for (int i = 0; i < BLOCK_OF_WORDS; i++) { /* any numbers will do; steps are odd */
        sum.keys[i] = FIRST_KEY(i);
        sum.steps[i] = KEY_STEP(i);
    }
    int64_t j = 0;
    for (; j + BLOCK_OF_WORDS <= count; j += BLOCK_OF_WORDS)
        add_block(&sum, words + j);
    if (j < count) {
        memcpy(last, words + j, (count - j) * sizeof(uint32_t));
        add_block(&sum, last);
    }
#if defined(__GNUC__)
    for (int i = 0; i < BLOCK_OF_WORDS / 2; i++)
        sums += sum.sums[i];
    for (int i = 0; i < BLOCK_OF_WORDS; i++)
        infinite |= sum.infinite[i];
#else
    sums = sum.sums;
    infinite = sum.infinite;
#endif
    *total = (int64_t)sums;
    *finite = !infinite;
}

#if TARGETS
/* The same by products of 32 bits. */
V3 static void sum_words_v3(const uint32_t *words, int64_t count, int64_t *total, int *finite)
{
    uint32_t first[BLOCK_OF_WORDS], each[BLOCK_OF_WORDS], last[BLOCK_OF_WORDS] = {0};
    uint64_t parts[4];
    for (int i = 0; i < BLOCK_OF_WORDS; i++) {
        first[i] = FIRST_KEY(i);
        each[i] = KEY_STEP(i);
    }
    __m256i keys[2], steps[2], sums[2], infinite = _mm256_setzero_si256(), exponent = _mm256_set1_epi32(EXPONENT);
    for (int n = 0; n < 2; n++) {
        keys[n] = _mm256_loadu_si256((const __m256i *)(first + 8 * n));
        steps[n] = _mm256_loadu_si256((const __m256i *)(each + 8 * n));
        sums[n] = _mm256_setzero_si256();
    }
    for (int64_t j = 0; j < count; j += BLOCK_OF_WORDS) {
        const uint32_t *here = words + j;
        if (count - j < BLOCK_OF_WORDS) {
            memcpy(last, here, (count - j) * sizeof(uint32_t));
            here = last;
        }
        for (int n = 0; n < 2; n++) {
            __m256i block = _mm256_loadu_si256((const __m256i *)(here + 8 * n)), keyed = _mm256_add_epi32(block, keys[n]);
            keys[n] = _mm256_add_epi32(keys[n], steps[n]);
            sums[n] = _mm256_add_epi64(sums[n], _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
            infinite = _mm256_or_si256(infinite, _mm256_cmpeq_epi32(_mm256_and_si256(block, exponent), exponent));
        }
    }
    _mm256_storeu_si256((__m256i *)parts, _mm256_add_epi64(sums[0], sums[1]));
    *total = (int64_t)((parts[0] + parts[1]) + (parts[2] + parts[3]));
    *finite = _mm256_testz_si256(infinite, infinite);
}

V4 static void sum_words_v4(const uint32_t *words, int64_t count, int64_t *total, int *finite)
{
    sum_words_body(words, count, total, finite);
}
#endif

static void sum_words(const uint32_t *words, int64_t count, int64_t *total, int *finite)
{
#if TARGETS
    if (level == 2)
        sum_words_v4(words, count, total, finite);
    else if (level == 1)
        sum_words_v3(words, count, total, finite);
    else
#endif
        sum_words_body(words, count, total, finite);
}

/* -- squares of rows -------------------------------------------------------------------------------------------- */

/* The sum of squares of one row in float64, in which nothing of float32 overflows or vanishes. */
INLINE double square_of_row(const float *row, int64_t width)
{
    double part[8] = {0}, total = 0;
    int64_t j = 0;
    if (width >= 32) {
        double wide[32] = {0};
        for (; j + 32 <= width; j += 32)
            for (int i = 0; i < 32; i++)
                wide[i] += (double)row[j + i] * row[j + i];
        for (int i = 0; i < 8; i++)
            part[i] = (wide[i] + wide[8 + i]) + (wide[16 + i] + wide[24 + i]);
    }
    for (; j + 8 <= width; j += 8)
        for (int i = 0; i < 8; i++)
            part[i] += (double)row[j + i] * row[j + i];
    for (; j < width; j++)
        total += (double)row[j] * row[j];
    return total + (((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7])));
}

/* Rows in two dimensions, with strides in bytes. */
typedef struct {
    const char *base;
    int64_t many, stride, rows, row_stride, width;
} Rows;

INLINE const float *row_of(const Rows *rows, int64_t m, int64_t n)
{
    return (const float *)(rows->base + m * rows->stride + n * rows->row_stride);
}

INLINE void square_rows_body(const Rows *rows, double *squares)
{
    for (int64_t m = 0; m < rows->many; m++)
        for (int64_t n = 0; n < rows->rows; n++)
            *squares++ = square_of_row(row_of(rows, m, n), rows->width);
}

COMPILED(square_rows, (const Rows *rows, double *squares), (rows, squares))

/* The rows of a user from the first to the last one that is not zero; what is not a number is not zero. */
typedef struct {
    int64_t first, end;
} Span;

/* What the rows of one user say: the sum of |left|*|right| (or |left|), how many are not zero, the longest side. */
INLINE void measure_user_body(const Rows *left, const Rows *right, int64_t user, double *told, Span *span)
{
    double total = 0, count = 0, most = 0;
    Span found = {0, 0};
    for (int64_t n = 0; n < left->rows; n++) {
        double one = square_of_row(row_of(left, user, n), left->width);
        double other = right ? square_of_row(row_of(right, user, n), right->width) : 1.0;
        double length = sqrt(one) * sqrt(other);
        total += length;
        if (length != 0) {
            found.first = count == 0 ? n : found.first;
            found.end = n + 1;
            count++;
        }
        most = one > most ? one : most;
        most = right && other > most ? other : most;
    }
    told[0] = total;
    told[1] = count;
    told[2] = sqrt(most);
    *span = found;
}

COMPILED(measure_user, (const Rows *left, const Rows *right, int64_t user, double *told, Span *span),
         (left, right, user, told, span))

/* The rows of each user whose product is not zero, in their order, then zeros: at most `room` of each. */
static int pack_rows(const Rows *left, const Rows *right, int64_t room, float *lefts, float *rights)
{
    for (int64_t user = 0; user < left->many; user++) {
        int64_t kept = 0;
        for (int64_t n = 0; n < left->rows; n++) {
            const float *one = row_of(left, user, n), *other = row_of(right, user, n);
            if (sqrt(square_of_row(one, left->width)) * sqrt(square_of_row(other, right->width)) == 0)
                continue;
            if (kept == room)
                return 0;
            memcpy(lefts + (user * room + kept) * left->width, one, left->width * sizeof(float));
            memcpy(rights + (user * room + kept++) * right->width, other, right->width * sizeof(float));
        }
        memset(lefts + (user * room + kept) * left->width, 0, (room - kept) * left->width * sizeof(float));
        memset(rights + (user * room + kept) * right->width, 0, (room - kept) * right->width * sizeof(float));
    }
    return 1;
}

/* Rows of a table, read by index: rows that read the same entry are added up in float64 first. */
INLINE void square_lookups_body(const int64_t *ids, const Rows *grad, int64_t user, double *sum, double *square)
{
    int64_t rows = grad->rows, width = grad->width;
    const int64_t *own = ids + user * rows;
    double total = 0;
    for (int64_t t = 0; t < rows; t++) {
        int64_t before = 0, after = 0;
        for (int64_t u = 0; u < t; u++)
            before += own[u] == own[t];
        if (before)
            continue; /* it was added to the first one */
        for (int64_t u = t + 1; u < rows; u++)
            after += own[u] == own[t];
        if (!after) {
            total += square_of_row(row_of(grad, user, t), width);
            continue;
        }
        for (int64_t j = 0; j < width; j++)
            sum[j] = row_of(grad, user, t)[j];
        for (int64_t u = t + 1; u < rows; u++)
            for (int64_t j = 0; own[u] == own[t] && j < width; j++)
                sum[j] += row_of(grad, user, u)[j];
        for (int64_t j = 0; j < width; j++)
            total += sum[j] * sum[j];
    }
    *square = total;
}

COMPILED(square_lookups, (const int64_t *ids, const Rows *grad, int64_t user, double *sum, double *square),
         (ids, grad, user, sum, square))

/* Adds rows of a table, read by index, to a user's gradient (entries, width); and keeps the sum of its squares. */
INLINE void add_lookups_body(const int64_t *ids, const Rows *grad, int64_t user, float *out, double *square)
{
    int64_t rows = grad->rows, width = grad->width;
    const int64_t *own = ids + user * rows;
    double less = 0, more = 0;
    for (int pass = 0; pass < 3; pass++)
        for (int64_t t = 0; t < rows; t++) {
            float *entry = out + own[t] * width;
            const float *row = row_of(grad, user, t);
            for (int64_t j = 0; pass == 0 && t + 8 < rows && j < width; j += 16) /* entries lie anywhere in memory */
                FETCH(out + own[t + 8] * width + j);
            if (pass == 1) {
                for (int64_t j = 0; j < width; j++)
                    entry[j] += row[j];
                continue;
            }
            int64_t before = 0;
            for (int64_t u = 0; u < t; u++)
                before += own[u] == own[t];
            if (!before)
                *(pass ? &more : &less) += square_of_row(entry, width);
        }
    *square += more - less;
}

COMPILED(add_lookups, (const int64_t *ids, const Rows *grad, int64_t user, float *out, double *square),
         (ids, grad, user, out, square))

/* -- products of rows --------------------------------------------------------------------------------------------- */

/* Per user: out = sum over rows t of left_t (x) right_t, each number one after the other in t, so that zeros after a
user's last row change no bit, whatever else is in the batch; BLAS does not promise that. And its sum of squares.

A tile of MOST x (PAIR vectors) stays in registers over all rows: one side gives its columns, the other the vectors. Where
`right` is shorter than a vector the two change places, and the tile is written turned. */
typedef struct {
    Rows left, right; /* (users, rows, Q), (users, rows, P) */
    float *out;       /* (users, Q, P) */
    double *squares;  /* (users,) */
    float *strip;     /* some columns of one side */
    float *last;      /* the last columns of the other, filled up with zeros */
    double *dots;     /* some columns in float64, and inner products of the rows of both sides */
} Product;

/* Columns of rows that are far apart: no processor guesses that the same line of each is wanted next, so it is asked for
while this one is multiplied. Where there are many rows, each on a page of its own, columns are put one behind the other
first. */
#define AHEAD 16 /* numbers: one line of the cache */
#define FAR_AHEAD(stride) ((stride) > 256)
#define FAR(rows, stride) ((rows) > 96 && (stride) > 1024)

#define PRODUCT(NAME, TARGET, BYTES, MOST, PAIR)                                                                       \
    typedef float NAME##_vector __attribute__((vector_size(BYTES), aligned(4)));                                       \
                                                                                                                       \
    TARGET INLINE void NAME##_tile(const int mr, const int nr, const int turned, const float *strip,                   \
                                   int64_t strip_stride, const float *vectors, int64_t stride, int64_t rows,           \
                                   float *out, int64_t out_stride, int64_t columns, NAME##_vector *square)             \
    {                                                                                                                  \
        const int width = BYTES / 4;                                                                                   \
        NAME##_vector sum[MOST][PAIR];                                                                                 \
        for (int i = 0; i < mr; i++)                                                                                   \
            for (int j = 0; j < nr; j++)                                                                               \
                sum[i][j] = (NAME##_vector){0};                                                                        \
        for (int64_t t = 0; t < rows; t++, strip += strip_stride, vectors += stride) {                                 \
            NAME##_vector some[PAIR];                                                                                  \
            for (int j = 0; j < nr; j++)                                                                               \
                some[j] = *(const NAME##_vector *)(vectors + j * width);                                               \
            for (int i = 0; i < mr; i++)                                                                               \
                for (int j = 0; j < nr; j++)                                                                           \
                    sum[i][j] += strip[i] * some[j];                                                                   \
        }                                                                                                              \
        NAME##_vector part[4] = {*square, {0}, {0}, {0}};                                                              \
        for (int i = 0; i < mr; i++)                                                                                   \
            for (int j = 0; j < nr; j++)                                                                               \
                part[(i * nr + j) % 4] += sum[i][j] * sum[i][j];                                                       \
        *square = (part[0] + part[1]) + (part[2] + part[3]);                                                           \
        if (!turned && columns == nr * width) {                                                                        \
            for (int i = 0; i < mr; i++)                                                                               \
                for (int j = 0; j < nr; j++)                                                                           \
                    *(NAME##_vector *)(out + i * out_stride + j * width) = sum[i][j];                                  \
            return;                                                                                                    \
        }                                                                                                              \
        for (int j = 0; j < nr; j++)                                                                                   \
            for (int k = 0; k < width && j * width + k < columns; k++)                                                 \
                for (int i = 0; i < mr; i++)                                                                           \
                    out[turned ? (j * width + k) * out_stride + i : i * out_stride + j * width + k] = sum[i][j][k];    \
    }                                                                                                                  \
                                                                                                                       \
    /* mr columns of one side, from c on, times all of the other. */                                                   \
    TARGET INLINE double NAME##_strip(const int mr, const int turned, const Product *product, int64_t user, int64_t c, \
                                      const float *from, int64_t from_stride)                                          \
    {                                                                                                                  \
        const int width = BYTES / 4;                                                                                   \
        const Rows *one = turned ? &product->right : &product->left, *other = turned ? &product->left : &product->right;\
        const float *vectors = row_of(other, user, 0);                                                                 \
        int64_t stride = other->row_stride / 4, wide = other->width, rows = one->rows, p = 0;                          \
        int64_t out_stride = product->right.width, step = turned ? out_stride : 1;                                     \
        float *out = product->out + user * one->width * wide + c * (turned ? 1 : out_stride);                          \
        NAME##_vector square = {0};                                                                                    \
        double total = 0;                                                                                              \
        for (; p + PAIR * width <= wide; p += PAIR * width) {                                                          \
            NAME##_tile(mr, PAIR, turned, from, from_stride, vectors + p, stride, rows, out + p * step, out_stride,    \
                        PAIR * width, &square);                                                                        \
            if (p % (64 * PAIR * width) == 0) { /* long sums are in float64 */                                         \
                for (int k = 0; k < width; k++)                                                                        \
                    total += square[k];                                                                                \
                square = (NAME##_vector){0};                                                                           \
            }                                                                                                          \
        }                                                                                                              \
        for (; p + width <= wide; p += width)                                                                          \
            NAME##_tile(mr, 1, turned, from, from_stride, vectors + p, stride, rows, out + p * step, out_stride, width,\
                        &square);                                                                                      \
        if (p < wide)                                                                                                  \
            NAME##_tile(mr, 1, turned, from, from_stride, product->last, width, rows, out + p * step, out_stride,      \
                        wide - p, &square);                                                                            \
        for (int k = 0; k < width; k++)                                                                                \
            total += square[k];                                                                                        \
        return total;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* One copy each of the code for MOST columns: two might round the squares differently. */                         \
    TARGET static ALONE double NAME##_most(const Product *product, int64_t user, int64_t c, const float *from,         \
                                           int64_t from_stride)                                                        \
    {                                                                                                                  \
        return NAME##_strip(MOST, 0, product, user, c, from, from_stride);                                             \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static ALONE double NAME##_most_turned(const Product *product, int64_t user, int64_t c, const float *from,  \
                                                  int64_t from_stride)                                                 \
    {                                                                                                                  \
        return NAME##_strip(MOST, 1, product, user, c, from, from_stride);                                             \
    }                                                                                                                  \
                                                                                                                       \
    TARGET INLINE double NAME##_sides(const int turned, const Product *product, int64_t user)                          \
    {                                                                                                                  \
        const int width = BYTES / 4;                                                                                   \
        const Rows *one = turned ? &product->right : &product->left, *other = turned ? &product->left : &product->right;\
        int64_t high = one->width, wide = other->width, c = 0, p = wide - wide % width;                                \
        double total = 0;                                                                                              \
        for (int64_t t = 0; p < wide && t < other->rows; t++)                                                          \
            for (int k = 0; k < width; k++)                                                                            \
                product->last[t * width + k] = p + k < wide ? row_of(other, user, t)[p + k] : 0.0f;                    \
        const float *from = row_of(one, user, 0);                                                                      \
        int64_t stride = one->row_stride / 4, rows = one->rows;                                                        \
        for (; c + MOST <= high; c += MOST) {                                                                          \
            const float *here = from + c;                                                                              \
            int64_t step = stride;                                                                                     \
            if (FAR_AHEAD(stride))                                                                                     \
                for (int64_t t = 0, next = c + AHEAD < high ? AHEAD : high - 1 - c; t < rows; t++)                     \
                    FETCH(here + t * stride + next);                                                                   \
            if (FAR(rows, stride)) {                                                                                   \
                float *to = product->strip;                                                                            \
                if (c + width <= high)                                                                                 \
                    for (int64_t t = 0; t < rows; t++) /* a few columns more than are needed: one vector a row */      \
                        *(NAME##_vector *)(to + t * width) = *(const NAME##_vector *)(here + t * stride);              \
                else                                                                                                   \
                    for (int64_t t = 0; t < rows; t++)                                                                 \
                        memcpy(to + t * width, here + t * stride, MOST * sizeof(float));                               \
                here = to;                                                                                             \
                step = width;                                                                                          \
            }                                                                                                          \
            total += (turned ? NAME##_most_turned : NAME##_most)(product, user, c, here, step);                        \
        }                                                                                                              \
        for (; MOST > 8 && c + 8 <= high; c += 8)                                                                      \
            total += NAME##_strip(MOST > 8 ? 8 : 4, turned, product, user, c, from + c, stride);                       \
        for (; c + 4 <= high; c += 4)                                                                                  \
            total += NAME##_strip(4, turned, product, user, c, from + c, stride);                                      \
        for (; c < high; c++)                                                                                          \
            total += NAME##_strip(1, turned, product, user, c, from + c, stride);                                      \
        return total;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static void NAME(const Product *product, int64_t user)                                                      \
    {                                                                                                                  \
        int turned = product->right.width < BYTES / 4 && product->left.width > product->right.width;                   \
        product->squares[user] = turned ? NAME##_sides(1, product, user) : NAME##_sides(0, product, user);             \
    }

/* Per user, without its gradient: the sum over t and u of (left_t . left_u)*(right_t . right_u), in float64. */
#define COLUMNS 512

#define GRAM(NAME, TARGET, COUNT, EACH)                                                                                \
    typedef double NAME##_wide __attribute__((vector_size(8 * COUNT), aligned(8)));                                    \
                                                                                                                       \
    /* Adds inner products of EACH rows from i on with EACH rows from j on; rows after the last one count for nothing. */\
    TARGET INLINE void NAME##_block(const double *some, int64_t columns, int64_t rows, int64_t i, int64_t j,           \
                                    NAME##_wide *dots)                                                                 \
    {                                                                                                                  \
        const double *one[EACH], *other[EACH];                                                                         \
        NAME##_wide sum[EACH][EACH];                                                                                   \
        for (int a = 0; a < EACH; a++) {                                                                               \
            one[a] = some + COLUMNS * (i + a < rows ? i + a : rows - 1);                                               \
            other[a] = some + COLUMNS * (j + a < rows ? j + a : rows - 1);                                             \
            for (int b = 0; b < EACH; b++)                                                                             \
                sum[a][b] = (NAME##_wide){0};                                                                          \
        }                                                                                                              \
        for (int64_t c = 0; c < columns; c += COUNT) {                                                                 \
            NAME##_wide row[EACH];                                                                                     \
            for (int b = 0; b < EACH; b++)                                                                             \
                row[b] = *(const NAME##_wide *)(other[b] + c);                                                         \
            for (int a = 0; a < EACH; a++)                                                                             \
                for (int b = 0; b < EACH; b++)                                                                         \
                    sum[a][b] += *(const NAME##_wide *)(one[a] + c) * row[b];                                          \
        }                                                                                                              \
        for (int a = 0; a < EACH && i + a < rows; a++)                                                                 \
            for (int b = 0; b < EACH && j + b < rows; b++)                                                             \
                dots[(i + a) * rows + j + b] += sum[a][b];                                                             \
    }                                                                                                                  \
                                                                                                                       \
    /* Inner products of all rows; columns that are in the cache, in float64, meet all of them. */                     \
    TARGET INLINE void NAME##_dots(const Rows *rows, int64_t user, double *some, NAME##_wide *dots)                    \
    {                                                                                                                  \
        int64_t count = rows->rows;                                                                                    \
        for (int64_t n = 0; n < count * count; n++)                                                                    \
            dots[n] = (NAME##_wide){0};                                                                                \
        for (int64_t c = 0; c < rows->width; c += COLUMNS) {                                                           \
            int64_t here = rows->width - c < COLUMNS ? rows->width - c : COLUMNS;                                      \
            int64_t filled = (here + COUNT - 1) / COUNT * COUNT;                                                       \
            for (int64_t t = 0; t < count; t++) {                                                                      \
                const float *row = row_of(rows, user, t) + c;                                                          \
                for (int64_t k = 0; k < here; k++)                                                                     \
                    some[t * COLUMNS + k] = row[k];                                                                    \
                memset(some + t * COLUMNS + here, 0, (filled - here) * sizeof(double));                                \
            }                                                                                                          \
            for (int64_t i = 0; i < count; i += EACH)                                                                  \
                for (int64_t j = 0; j <= i; j += EACH)                                                                 \
                    NAME##_block(some, filled, count, i, j, dots);                                                     \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET static void NAME(const Product *product, int64_t user)                                                      \
    {                                                                                                                  \
        int64_t rows = product->left.rows;                                                                             \
        double *some = product->dots, total = 0;                                                                       \
        NAME##_wide *lefts = (NAME##_wide *)(some + COLUMNS * rows), *rights = lefts + rows * rows;                    \
        if (rows == 1)                                                                                                 \
            total = square_of_row(row_of(&product->left, user, 0), product->left.width) *                              \
                    square_of_row(row_of(&product->right, user, 0), product->right.width);                             \
        else {                                                                                                         \
            NAME##_dots(&product->left, user, some, lefts);                                                            \
            NAME##_dots(&product->right, user, some, rights);                                                          \
            for (int64_t t = 0; t < rows; t++)                                                                         \
                for (int64_t u = 0; u <= t; u++) {                                                                     \
                    double left = 0, right = 0;                                                                        \
                    for (int k = 0; k < COUNT; k++) {                                                                  \
                        left += lefts[t * rows + u][k];                                                                \
                        right += rights[t * rows + u][k];                                                              \
                    }                                                                                                  \
                    total += (u < t ? 2 : 1) * left * right;                                                           \
                }                                                                                                      \
        }                                                                                                              \
        product->squares[user] = total;                                                                                \
    }

#if TARGETS
PRODUCT(product_v4, V4, 64, 12, 2)
PRODUCT(product_v3, V3, 32, 6, 2)
GRAM(gram_v4, V4, 8, 4)
GRAM(gram_v3, V3, 4, 3)
#endif

/* -- rows of linear layers ------------------------------------------------------------------------------------------- */

/* The sum of one user's rows, one after the other, so that zeros behind the last one change no bit. */
INLINE void sum_rows_body(const Rows *rows, int64_t user, float *out)
{
    int64_t width = rows->width, t = 0;
    memset(out, 0, width * sizeof(float));
    for (; t + 4 <= rows->rows; t += 4) {
        const float *a = row_of(rows, user, t), *b = row_of(rows, user, t + 1);
        const float *c = row_of(rows, user, t + 2), *d = row_of(rows, user, t + 3);
        for (int64_t j = 0; j < width; j++)
            out[j] = (((out[j] + a[j]) + b[j]) + c[j]) + d[j];
    }
    for (; t < rows->rows; t++) {
        const float *a = row_of(rows, user, t);
        for (int64_t j = 0; j < width; j++)
            out[j] += a[j];
    }
}

COMPILED(sum_rows, (const Rows *rows, int64_t user, float *out), (rows, user, out))

#define AT_ONCE 8192 /* numbers of a sum that stay in the cache while all users are added */
#define CROWD 64     /* users that are added to each other first, so that little is lost however many there are */

/* part[j] += the sum over eight users, or fewer, of c[user]*own[user][j]. */
INLINE void weigh_some(const float *own, int64_t stride, int64_t users, const float *c, float *part, int64_t count)
{
    const float *a = own, *b = own + stride, *d = own + 2 * stride, *e = own + 3 * stride;
    if (users == 8) {
        const float *f = e + stride, *g = f + stride, *h = g + stride, *i = h + stride;
        for (int64_t j = 0; j < count; j++)
            part[j] += ((c[0] * a[j] + c[1] * b[j]) + (c[2] * d[j] + c[3] * e[j])) +
                       ((c[4] * f[j] + c[5] * g[j]) + (c[6] * h[j] + c[7] * i[j]));
        return;
    }
    for (int64_t user = 0; user < users; user++)
        for (int64_t j = 0; j < count; j++)
            part[j] += c[user] * own[user * stride + j];
}

/* Some numbers, from `from` to `to`, of the sum over users of c[user]*written[user]; added to `out` or put there. */
INLINE void weigh_body(const float *written, int64_t users, int64_t numbers, const float *c, float *out, int adds,
                       int64_t from, int64_t to)
{
    float sums[AT_ONCE], part[AT_ONCE];
    for (int64_t here = from; here < to; here += AT_ONCE) {
        int64_t count = to - here < AT_ONCE ? to - here : AT_ONCE;
        memset(sums, 0, sizeof sums);
        for (int64_t crowd = 0; crowd < users; crowd += CROWD) {
            int64_t end = users - crowd < CROWD ? users : crowd + CROWD;
            memset(part, 0, sizeof part);
            for (int64_t user = crowd; user < end; user += 8)
                weigh_some(written + user * numbers + here, numbers, end - user < 8 ? end - user : 8, c + user, part,
                           count);
            for (int64_t j = 0; j < count; j++)
                sums[j] += part[j];
        }
        for (int64_t j = 0; j < count; j++)
            out[here + j] = adds ? out[here + j] + sums[j] : sums[j];
    }
}

COMPILED(weigh,
         (const float *written, int64_t users, int64_t numbers, const float *c, float *out, int adds, int64_t from,
          int64_t to),
         (written, users, numbers, c, out, adds, from, to))

/* -- layer normalisation ------------------------------------------------------------------------------------------- */

/* Per user: sums over its rows of grad*(x - mean)*scale, and of grad; each row has a mean and a scale. */
INLINE void norm_sums_body(const Rows *x, const Rows *grad, const float *mean, const float *scale, int64_t user,
                           float *scaled, float *summed)
{
    int64_t width = x->width;
    memset(scaled, 0, width * sizeof(float));
    memset(summed, 0, width * sizeof(float));
    for (int64_t t = 0; t < x->rows; t++) {
        const float *row = row_of(x, user, t), *g = row_of(grad, user, t);
        float middle = mean[user * x->rows + t], by = scale[user * x->rows + t];
        for (int64_t j = 0; j < width; j++) {
            scaled[j] += g[j] * ((row[j] - middle) * by);
            summed[j] += g[j];
        }
    }
}

COMPILED(norm_sums,
         (const Rows *x, const Rows *grad, const float *mean, const float *scale, int64_t user, float *scaled,
          float *summed),
         (x, grad, mean, scale, user, scaled, summed))

/* -- variances through a layer norm ------------------------------------------------------------------------------- */

#define SIDE 8 /* numbers that are computed side by side */
#if defined(__GNUC__)
typedef float Side __attribute__((vector_size(4 * SIDE)));
typedef float AnySide __attribute__((vector_size(4 * SIDE), aligned(4), may_alias)); /* wherever it lies */
typedef int32_t Signs __attribute__((vector_size(4 * SIDE)));
#define side_of(from) (*(const AnySide *)(from))
#else /* one number, and the same arithmetic */
#undef SIDE
#define SIDE 1
typedef float Side;
#define side_of(from) (*(from))
#endif

INLINE float sum_of_side(const Side *side)
{
    float each[SIDE];
    memcpy(each, side, sizeof(each));
    for (int half = SIDE / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            each[i] += each[i + half];
    return each[0];
}

/* A row whose width is no multiple of SIDE is filled up with zeros; `real` is one where there is a number. */
typedef struct {
    const float *mean, *var, *scale, *real;
    int64_t width, padded;
} NormRow;

/* What a layer norm makes of variances: moments.layer_norm has the formula. */
INLINE void norm_variance_body(const NormRow *row, float weight_var, float bias_var, float eps, float *out)
{
    float size = (float)row->width;
    Side means = {0}, vars = {0}, squares = {0}, along = {0}, twice = {0};
    for (int64_t j = 0; j < row->padded; j += SIDE) {
        means += side_of(row->mean + j);
        vars += side_of(row->var + j);
    }
    float middle = sum_of_side(&means) / size, average = sum_of_side(&vars) / size;
    for (int64_t j = 0; j < row->padded; j += SIDE) {
        Side centred = (side_of(row->mean + j) - middle) * side_of(row->real + j);
        squares += centred * centred;
    }
    float rate = 1 / sqrtf(sum_of_side(&squares) / size + (1 - 1 / size) * average + eps);
    for (int64_t j = 0; j < row->padded; j += SIDE) {
        Side n = (side_of(row->mean + j) - middle) * side_of(row->real + j) * rate, weighted = n * side_of(row->var + j);
        along += weighted;
        twice += n * weighted;
    }
    float line = 2 * sum_of_side(&along) / size, bend = sum_of_side(&twice) / size, less = 1 / size;
    for (int64_t j = 0; j < row->padded; j += SIDE) {
        Side n = (side_of(row->mean + j) - middle) * rate, square = n * n, var = side_of(row->var + j);
        Side left = var - (2 * var * (1 + square) - (average + line * n + bend * square)) * less;
#if SIDE == 1
        left = left < 0 ? 0 : left; /* what is not a number stays so */
#else
        left = (Side)((Signs)left & ~(Signs)(left < 0));
#endif
        left = left * (rate * rate) * side_of(row->scale + j) + weight_var * square + bias_var;
        memcpy(out + j, &left, sizeof(left));
    }
}

COMPILED(norm_variance,
         (const NormRow *row, float weight_var, float bias_var, float eps, float *out),
         (row, weight_var, bias_var, eps, out))

/* Of all rows; `room` holds five padded rows, for widths that are no multiple of SIDE. */
static void norm_variances(const Rows *mean, const Rows *var, const float *scale, const double *numbers, float *room,
                           float *out)
{
    int64_t width = mean->width, padded = (width + SIDE - 1) / SIDE * SIDE;
    float *means = room, *vars = room + padded, *scales = room + 2 * padded, *real = room + 3 * padded;
    memcpy(scales, scale, width * sizeof(float));
    for (int64_t j = 0; j < width; j++)
        real[j] = 1;
    for (int64_t t = 0; t < mean->rows; t++) {
        NormRow row = {row_of(mean, 0, t), row_of(var, 0, t), scales, real, width, padded};
        float *to = padded == width ? out + t * width : room + 4 * padded;
        if (padded != width) {
            memcpy(means, row.mean, width * sizeof(float));
            memcpy(vars, row.var, width * sizeof(float));
            row.mean = means;
            row.var = vars;
        }
        norm_variance(&row, (float)numbers[0], (float)numbers[1], (float)numbers[2], to);
        if (padded != width)
            memcpy(out + t * width, to, width * sizeof(float));
    }
}

/* e^x for -87 <= x <= 0, to two units in the last place (the series of Cephes' expf.c). */
INLINE float exp_below(float x)
{
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* to the nearest whole number */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * bits_to_float((uint32_t)((int32_t)n + 127) << 23);
}

/* Phi(-t)*exp(t^2/2) for 0 <= t <= 12, to 1.4e-8 of it: a polynomial in s = 1/(1 + 0.26*t), fitted by least squares that
were weighted anew until all errors were alike. */
INLINE float scaled_tail(float t)
{
    float s = 1.0f / (1.0f + 0.26f * t), p = 0.03163887034f;
    p = p * s - 0.1584033349f;
    p = p * s + 0.2631677874f;
    p = p * s - 0.1645337791f;
    p = p * s + 0.1705307186f;
    p = p * s + 0.04683854608f;
    p = p * s + 0.1041366706f;
    p = p * s + 0.1028555422f;
    p = p * s + 0.1037689724f;
    return p * s;
}

/* The variance of max(0, X) for X ~ N(mean, var), as reattention/activations.py derives it. Beyond 12 deviations it is 0 or
`var` in float32, and numbers nearer to zero than 1e-38, which cost a hundred times as much, do not arise. */
INLINE void relu_variances_body(const float *mean, const float *var, float *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float v = var[i] > FLT_MIN ? var[i] : FLT_MIN, a = mean[i] / sqrtf(v);
        a = a < -12.0f ? -12.0f : a; /* what is not a number stays so */
        a = a > 12.0f ? 12.0f : a;
        float density = exp_below(-0.5f * a * a), tail = density * scaled_tail(fabsf(a));
        float below = a < 0 ? tail : 1.0f - tail, u = 0.3989422804f * density + a * below, unit = below + u * (a - u);
        unit = unit < 0 ? 0 : unit;
        unit = a <= -12.0f ? 0 : unit; /* not both in one: compilers would branch */
        out[i] = unit * var[i];
    }
}

COMPILED(relu_variances, (const float *mean, const float *var, float *out, int64_t count), (mean, var, out, count))

/* -- for Python -------------------------------------------------------------------------------------------------- */

/* Whether a format of the buffer protocol is float (f), double (d), or a whole number of 32 (i) or 64 (q) bits. */
static int is_kind(const Py_buffer *view, char kind)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (format[0] == '\0' || format[1] != '\0' || view->itemsize != (kind == 'f' || kind == 'i' ? 4 : 8))
        return 0;
    return format[0] == kind || (format[0] == 'l' && (kind == 'i' || kind == 'q'));
}

/* The memory of an array of this kind, whose items lie one behind the other. */
static int open_array(PyObject *array, Py_buffer *view, char kind, int writes)
{
    if (PyObject_GetBuffer(array, view, (writes ? PyBUF_CONTIG : PyBUF_CONTIG_RO) | PyBUF_FORMAT) < 0)
        return -1;
    if (is_kind(view, kind))
        return 0;
    PyErr_Format(PyExc_ValueError, "items are of format %s, expected %c", view->format ? view->format : "B", kind);
    PyBuffer_Release(view);
    return -1;
}

/* Several; an upper-case kind is written to. */
static int open_arrays(PyObject *const *arrays, Py_buffer *views, const char *kinds)
{
    for (int n = 0; kinds[n]; n++) {
        int writes = kinds[n] >= 'A' && kinds[n] <= 'Z';
        if (open_array(arrays[n], views + n, writes ? kinds[n] + 'a' - 'A' : kinds[n], writes) < 0) {
            while (n--)
                PyBuffer_Release(views + n);
            return -1;
        }
    }
    return 0;
}

static void close_arrays(Py_buffer *views, int count)
{
    for (int n = 0; n < count; n++)
        PyBuffer_Release(views + n);
}

static int expect(Py_ssize_t given, Py_ssize_t expected, const char *what)
{
    if (given == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", what, expected, given);
    return 0;
}

/* Words of four bytes by address and number: an array of a tensor would forbid torch to resize it, as FSDP does. */
static int open_place(PyObject *place, const uint32_t **words, int64_t *count)
{
    long long address, number;
    if (!PyTuple_Check(place)) {
        PyErr_SetString(PyExc_TypeError, "expected an address and a number of words");
        return -1;
    }
    if (!PyArg_ParseTuple(place, "LL", &address, &number))
        return -1;
    if (number < 0) {
        PyErr_SetString(PyExc_ValueError, "the number of words is negative");
        return -1;
    }
    *words = (const uint32_t *)(uintptr_t)address;
    *count = number;
    return 0;
}

/* Addresses and counts of pieces of memory; how many numbers there are, or -1. */
static int64_t open_pieces(PyObject *list, float ***pieces, int64_t **counts)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of addresses and counts");
        return -1;
    }
    Py_ssize_t many = PyList_GET_SIZE(list);
    int64_t total = 0;
    *pieces = PyMem_New(float *, many + 1);
    *counts = PyMem_New(int64_t, many + 1);
    int failed = *pieces == NULL || *counts == NULL;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t n = 0; !failed && n < many; n++) {
        const uint32_t *words = NULL;
        failed = open_place(PyList_GET_ITEM(list, n), &words, *counts + n) < 0;
        (*pieces)[n] = (float *)words;
        if (!failed && ((*counts)[n] == 0 || (*counts)[n] > ((int64_t)1 << 48) - total)) {
            PyErr_SetString(PyExc_ValueError, "a piece is empty, or too large");
            failed = 1;
        }
        total += failed ? 0 : (*counts)[n];
    }
    if (!failed)
        return total;
    PyMem_Free(*pieces);
    PyMem_Free(*counts);
    return -1;
}

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


/* Words of several tensors, one behind the other, in rows; a row that lies in one tensor is hashed where it lies. */
typedef struct {
    const uint32_t *keys;
    int64_t width, number; /* of a row, and of keys */
    uint64_t *hashes;
    uint32_t *row; /* the row that is being filled, and how far */
    int64_t filled;
} Hashing;

static void hash_one(Hashing *to, const uint32_t *row, int64_t words)
{
    for (int64_t key = 0; key < to->number; key++)
        hash_row(row, to->keys + key * to->width, words, to->hashes++);
}

static void hash_words(Hashing *to, const uint32_t *words, int64_t count)
{
    while (count > 0) {
        int64_t some = to->width - to->filled < count ? to->width - to->filled : count;
        if (some == to->width)
            hash_one(to, words, some);
        else {
            memcpy(to->row + to->filled, words, some * sizeof(uint32_t));
            to->filled += some;
            if (to->filled == to->width) {
                hash_one(to, to->row, to->width);
                to->filled = 0;
            }
        }
        words += some;
        count -= some;
    }
}

static PyObject *py_hash_words(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 4, "hash_words"))
        return NULL;
    Py_ssize_t width = PyLong_AsSsize_t(args[3]);
    if (width == -1 && PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[0]) || width <= 0 || width % 2)
        return PyErr_Format(PyExc_ValueError, "expected a list of addresses and numbers, and rows of pairs of words");
    Py_buffer view[2];
    if (open_arrays(args + 1, view, "iQ") < 0)
        return NULL;
    int64_t number = view[0].len / 4 / width, room = number ? view[1].len / 8 / number : 0, total = 0;
    uint32_t *row = PyMem_Malloc(width * sizeof(uint32_t));
    Hashing to = {view[0].buf, width, number, view[1].buf, row, 0};
    int failed = row == NULL;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t n = 0; !failed && n < PyList_GET_SIZE(args[0]); n++) {
        const uint32_t *words;
        int64_t number_of_words;
        if (open_place(PyList_GET_ITEM(args[0], n), &words, &number_of_words) < 0)
            failed = 1;
        else if (number_of_words > room * width - total) {
            PyErr_SetString(PyExc_ValueError, "more words than there is room for hashes");
            failed = 1;
        }
        else {
            total += number_of_words;
            hash_words(&to, words, number_of_words);
        }
    }
    if (!failed && to.filled) { /* the zeros after the last words are added where their products are known */
        if (to.filled % 2)
            row[to.filled++] = 0;
        hash_one(&to, row, to.filled);
    }
    PyMem_Free(row);
    close_arrays(view, 2);
    return failed ? NULL : PyLong_FromLongLong(total);
}

static PyObject *py_sums_of_words(PyObject *self, PyObject *places)
{
    (void)self;
    if (!PyList_Check(places))
        return PyErr_Format(PyExc_TypeError, "expected a list of addresses and counts");
    PyObject *sums = PyList_New(0);
    int all_finite = 1;
    for (Py_ssize_t n = 0; sums != NULL && n < PyList_GET_SIZE(places); n++) {
        const uint32_t *words;
        int64_t count, total = 0;
        int finite = 1;
        if (open_place(PyList_GET_ITEM(places, n), &words, &count) < 0) {
            Py_CLEAR(sums);
            break;
        }
        sum_words(words, count, &total, &finite);
        all_finite &= finite;
        PyObject *sum = PyLong_FromLongLong(total);
        if (sum == NULL || PyList_Append(sums, sum) < 0)
            Py_CLEAR(sums);
        Py_XDECREF(sum);
    }
    return sums == NULL ? NULL : Py_BuildValue("(NO)", sums, all_finite ? Py_True : Py_False);
}

#define MANY (1 << 24)    /* users, or rows of one user */
#define LONGEST (1 << 28) /* numbers of a row */

/* An array of float32 with two or three dimensions, the last one without gaps. */
static int open_rows(PyObject *array, Py_buffer *view, Rows *rows)
{
    if (PyObject_GetBuffer(array, view, PyBUF_STRIDED_RO | PyBUF_FORMAT) < 0)
        return -1;
    int last = view->ndim - 1, wrong = last < 1 || last > 2 || !is_kind(view, 'f');
    for (int n = 0; n <= last && !wrong; n++) /* so that products of two sizes, in bytes, are numbers */
        wrong = view->shape[n] > (n == last ? LONGEST : MANY) || view->strides[n] % 4;
    if (wrong || (view->strides[last] != 4 && view->shape[last] > 1)) {
        PyErr_SetString(PyExc_ValueError, "expected float32 in two or three dimensions, the last one without gaps");
        PyBuffer_Release(view);
        return -1;
    }
    rows->base = view->buf;
    rows->many = last == 2 ? view->shape[0] : 1;
    rows->stride = last == 2 ? view->strides[0] : 0;
    rows->rows = view->shape[last - 1];
    rows->row_stride = view->strides[last - 1];
    rows->width = view->shape[last];
    return 0;
}

static int64_t squares_of_array(PyObject *array, double *squares, int64_t room)
{
    Py_buffer view;
    Rows rows;
    if (open_rows(array, &view, &rows) < 0)
        return -1;
    int64_t count = rows.many * rows.rows;
    if (count <= room) {
        Py_BEGIN_ALLOW_THREADS
        square_rows(&rows, squares);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    if (count <= room)
        return count;
    PyErr_SetString(PyExc_ValueError, "more rows than there is room for");
    return -1;
}

static PyObject *py_squares_of_rows(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 2, "squares_of_rows"))
        return NULL;
    if (!PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "expected a list of arrays");
    Py_buffer view;
    if (open_array(args[1], &view, 'd', 1) < 0)
        return NULL;
    int64_t done = 0, room = view.len / 8;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(args[0]); n++) {
        int64_t rows = squares_of_array(PyList_GET_ITEM(args[0], n), (double *)view.buf + done, room - done);
        if (rows < 0) {
            PyBuffer_Release(&view);
            return NULL;
        }
        done += rows;
    }
    PyBuffer_Release(&view);
    if (done != room)
        return PyErr_Format(PyExc_ValueError, "%lld rows, and room for %lld", (long long)done, (long long)room);
    Py_RETURN_NONE;
}

/* Of one pair of sides, users first; the second may be None. */
static int measure_pair(PyObject *one, PyObject *other, double *out, int64_t users)
{
    Py_buffer view[2];
    Rows left, right;
    Span span;
    int paired = other != Py_None, wrong;
    if (open_rows(one, view, &left) < 0)
        return -1;
    if (paired && open_rows(other, view + 1, &right) < 0) {
        PyBuffer_Release(view);
        return -1;
    }
    wrong = view->ndim != 3 || left.many != users ||
            (paired && (view[1].ndim != 3 || right.many != users || right.rows != left.rows));
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "the sides are not of the same users and rows");
    else {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t user = 0; user < users; user++)
            measure_user(&left, paired ? &right : NULL, user, out + 3 * user, &span);
        Py_END_ALLOW_THREADS
    }
    close_arrays(view, 1 + paired);
    return wrong ? -1 : 0;
}

static PyObject *py_measure_rows(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 3, "measure_rows"))
        return NULL;
    if (!PyList_Check(args[0]) || !PyList_Check(args[1]) || PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]))
        return PyErr_Format(PyExc_TypeError, "expected two lists of as many arrays");
    Py_ssize_t pairs = PyList_GET_SIZE(args[0]);
    Py_buffer view;
    if (open_array(args[2], &view, 'd', 1) < 0)
        return NULL;
    int64_t users = pairs ? view.len / 24 / pairs : 0;
    int failed = view.len != 24 * pairs * users;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "expected room for three numbers of each user and pair");
    for (Py_ssize_t n = 0; !failed && n < pairs; n++)
        failed = measure_pair(PyList_GET_ITEM(args[0], n), PyList_GET_ITEM(args[1], n),
                              (double *)view.buf + 3 * users * n, users) < 0;
    PyBuffer_Release(&view);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Two arrays of rows of the same users, users first. */
static int open_sides(PyObject *const *args, Py_buffer *views, Rows *left, Rows *right)
{
    if (open_rows(args[0], views, left) < 0)
        return -1;
    if (open_rows(args[1], views + 1, right) < 0) {
        PyBuffer_Release(views);
        return -1;
    }
    if (views[0].ndim == 3 && views[1].ndim == 3 && left->many == right->many && left->rows == right->rows)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the sides are not of the same users and rows");
    close_arrays(views, 2);
    return -1;
}

#if TARGETS
/* Rows and products of all users; a user's rows are multiplied while they are in the cache. Where everybody has fewer
rows than `reach`, nothing is multiplied: 0. Rows of zeros before the first other one and after the last, which is what
padding is in the backward pass, change no bit and are left out. */
static int measure_and_multiply(const Product *product, int64_t users, double *told, double reach)
{
    int64_t known = 0; /* users whose rows are measured */
    Span span;
    while (told && known < users) {
        measure_user(&product->left, &product->right, known, told + 3 * known, &span);
        if (told[3 * known++ + 1] >= reach)
            break;
        if (known == users)
            return 0;
    }
    for (int64_t user = 0; user < users; user++) {
        Product one = *product;
        if (told && user >= known) {
            measure_user(&product->left, &product->right, user, told + 3 * user, &span);
            one.left.base += span.first * one.left.row_stride;
            one.right.base += span.first * one.right.row_stride;
            one.left.rows = one.right.rows = span.end - span.first;
        }
        (level == 2 ? product_v4 : product_v3)(&one, user);
    }
    return 1;
}
#endif

/* write_products(left, right, out, squares) or with (told, reach) behind them. */
static PyObject *py_write_products(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
#if !TARGETS
    (void)args, (void)count;
    return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
#else
    int measures = count == 6, made = measures ? 3 : 2, wrong, written = 0;
    if (!measures && !expect(count, 4, "write_products"))
        return NULL;
    if (level == 0)
        return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
    double reach = measures ? PyFloat_AsDouble(args[5]) : 0;
    if (reach == -1.0 && PyErr_Occurred())
        return NULL;
    Py_buffer sides[2], view[3];
    Product product;
    if (open_sides(args, sides, &product.left, &product.right) < 0)
        return NULL;
    if (open_arrays(args + 2, view, measures ? "FDD" : "FD") < 0) {
        close_arrays(sides, 2);
        return NULL;
    }
    int64_t users = product.left.many, numbers = product.left.width * product.right.width;
    product.out = view[0].buf;
    product.squares = view[1].buf;
    product.strip = NULL;
    wrong = (double)view[0].len != 4.0 * users * numbers || view[1].len != 8 * users ||
            (measures && view[2].len != 24 * users);
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "the sides, the products and their squares are not of the same users");
    else if ((product.strip = PyMem_RawMalloc(64 * 2 * (product.left.rows + 1))) == NULL) {
        PyErr_NoMemory();
        wrong = 1;
    }
    else {
        product.last = product.strip + 16 * (product.left.rows + 1);
        Py_BEGIN_ALLOW_THREADS
        written = measure_and_multiply(&product, users, measures ? view[2].buf : NULL, reach);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(product.strip);
    close_arrays(view, made);
    close_arrays(sides, 2);
    return wrong ? NULL : PyBool_FromLong(written);
#endif
}

/* write_ragged(left, right, counts, out, squares, first, last): `write_products` of users with unequal numbers of rows,
packed user by user; only of those from first to last. */
static PyObject *py_write_ragged(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
#if !TARGETS
    (void)args, (void)count;
    return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
#else
    if (!expect(count, 7, "write_ragged"))
        return NULL;
    if (level == 0)
        return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
    int64_t first = PyLong_AsLongLong(args[5]), last = PyLong_AsLongLong(args[6]), rows = 0, most = 0;
    if (PyErr_Occurred())
        return NULL;
    Py_buffer sides[2], view[3];
    Product product;
    if (open_rows(args[0], sides, &product.left) < 0)
        return NULL;
    if (open_rows(args[1], sides + 1, &product.right) < 0) {
        PyBuffer_Release(sides);
        return NULL;
    }
    if (open_arrays(args + 2, view, "qFD") < 0) {
        close_arrays(sides, 2);
        return NULL;
    }
    const int64_t *counts = view[0].buf;
    int64_t users = view[0].len / 8, numbers = product.left.width * product.right.width;
    int wrong = sides[0].ndim != 2 || sides[1].ndim != 2 || product.left.rows != product.right.rows || users > MANY ||
                (double)view[1].len != 4.0 * users * numbers || view[2].len != 8 * users || first < 0 ||
                first > last || last > users;
    for (int64_t user = 0; user < users && !wrong; user++) {
        wrong = counts[user] < 0 || counts[user] > product.left.rows - rows;
        rows += counts[user];
        most = counts[user] > most ? counts[user] : most;
    }
    product.strip = NULL;
    if (wrong || rows != product.left.rows) {
        wrong = 1;
        PyErr_SetString(PyExc_ValueError, "the sides, the products and their squares are not of these users");
    }
    else if ((product.strip = PyMem_RawMalloc(64 * 2 * (most + 1))) == NULL) {
        PyErr_NoMemory();
        wrong = 1;
    }
    else {
        product.last = product.strip + 16 * (most + 1);
        Py_BEGIN_ALLOW_THREADS
        for (int64_t user = 0; user < last; user++) {
            product.left.rows = product.right.rows = counts[user];
            product.out = (float *)view[1].buf + user * numbers;
            product.squares = (double *)view[2].buf + user;
            if (user >= first)
                (level == 2 ? product_v4 : product_v3)(&product, 0);
            product.left.base += counts[user] * product.left.row_stride;
            product.right.base += counts[user] * product.right.row_stride;
        }
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(product.strip);
    close_arrays(view, 3);
    close_arrays(sides, 2);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
#endif
}

static PyObject *py_norm_sums(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 6, "norm_sums"))
        return NULL;
    Py_buffer sides[2], view[4];
    Rows x, grad;
    if (open_sides(args, sides, &x, &grad) < 0)
        return NULL;
    if (open_arrays(args + 2, view, "ffFF") < 0) {
        close_arrays(sides, 2);
        return NULL;
    }
    int wrong = x.width != grad.width || view[0].len != 4 * x.many * x.rows || view[1].len != view[0].len ||
                view[2].len != 4 * x.many * x.width || view[3].len != view[2].len;
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "inputs, gradients and sums are not of the same users and rows");
    else {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t user = 0; user < x.many; user++)
            norm_sums(&x, &grad, view[0].buf, view[1].buf, user, (float *)view[2].buf + user * x.width,
                      (float *)view[3].buf + user * x.width);
        Py_END_ALLOW_THREADS
    }
    close_arrays(view, 4);
    close_arrays(sides, 2);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_norm_variances(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 7, "norm_variances"))
        return NULL;
    double numbers[3];
    for (int n = 0; n < 3; n++)
        if ((numbers[n] = PyFloat_AsDouble(args[4 + n])) == -1 && PyErr_Occurred())
            return NULL;
    Py_buffer sides[2], view[2];
    Rows mean, var;
    if (open_rows(args[0], sides, &mean) < 0)
        return NULL;
    if (open_rows(args[1], sides + 1, &var) < 0) {
        PyBuffer_Release(sides);
        return NULL;
    }
    if (open_arrays(args + 2, view, "fF") < 0) {
        close_arrays(sides, 2);
        return NULL;
    }
    int wrong = sides[0].ndim != 2 || sides[1].ndim != 2 || mean.rows != var.rows || mean.width != var.width ||
                view[0].len != 4 * mean.width || view[1].len != 4 * mean.rows * mean.width;
    float *room = wrong ? NULL : PyMem_RawCalloc(5 * (mean.width + SIDE), sizeof(float));
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "means, variances and scales are not of the same rows");
    else if (room == NULL) {
        PyErr_NoMemory();
        wrong = 1;
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        norm_variances(&mean, &var, view[0].buf, numbers, room, view[1].buf);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(room);
    close_arrays(view, 2);
    close_arrays(sides, 2);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_relu_variances(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 3, "relu_variances"))
        return NULL;
    Py_buffer view[3];
    if (open_arrays(args, view, "ffF") < 0)
        return NULL;
    int wrong = view[0].len != view[1].len || view[0].len != view[2].len;
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "means, variances and results are not as many");
    else {
        Py_BEGIN_ALLOW_THREADS
        relu_variances(view[0].buf, view[1].buf, view[2].buf, view[0].len / 4);
        Py_END_ALLOW_THREADS
    }
    close_arrays(view, 3);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_pack_rows(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 4, "pack_rows"))
        return NULL;
    Py_buffer sides[2], view[2];
    Rows left, right;
    if (open_sides(args, sides, &left, &right) < 0)
        return NULL;
    if (open_arrays(args + 2, view, "FF") < 0) {
        close_arrays(sides, 2);
        return NULL;
    }
    int64_t each = 4 * left.many * left.width, room = each ? view[0].len / each : 0;
    int wrong = view[0].len != room * each || (double)view[1].len != 4.0 * room * right.many * right.width;
    if (!wrong) {
        Py_BEGIN_ALLOW_THREADS
        wrong = !pack_rows(&left, &right, room, view[0].buf, view[1].buf);
        Py_END_ALLOW_THREADS
    }
    close_arrays(view, 2);
    close_arrays(sides, 2);
    if (wrong)
        return PyErr_Format(PyExc_ValueError, "no room for the rows that are not zero");
    Py_RETURN_NONE;
}

static PyObject *py_square_lookups(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 3, "square_lookups"))
        return NULL;
    Py_buffer rows, view[2];
    Rows grad;
    if (open_rows(args[1], &rows, &grad) < 0)
        return NULL;
    PyObject *const others[] = {args[0], args[2]};
    if (open_arrays(others, view, "qD") < 0) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    double *sum = NULL;
    int wrong = rows.ndim != 3 || view[0].len != 8 * grad.many * grad.rows || view[1].len != 8 * grad.many;
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "ids, gradients and squares are not of the same users and rows");
    else if ((sum = PyMem_RawMalloc(8 * (grad.width + 1))) == NULL) {
        PyErr_NoMemory();
        wrong = 1;
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t user = 0; user < grad.many; user++)
            square_lookups(view[0].buf, &grad, user, sum, (double *)view[1].buf + user);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(sum);
    close_arrays(view, 2);
    PyBuffer_Release(&rows);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_add_lookups(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 4, "add_lookups"))
        return NULL;
    Py_buffer rows, view[3];
    Rows grad;
    if (open_rows(args[1], &rows, &grad) < 0)
        return NULL;
    PyObject *const others[] = {args[0], args[2], args[3]};
    if (open_arrays(others, view, "qFD") < 0) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    const int64_t *ids = view[0].buf;
    int64_t reads = grad.many * grad.rows, each = 4 * grad.many * grad.width, entries = each ? view[1].len / each : 0;
    int wrong = rows.ndim != 3 || view[0].len != 8 * reads || view[1].len != entries * each ||
                view[2].len != 8 * grad.many;
    for (int64_t n = 0; !wrong && n < reads; n++)
        wrong = ids[n] < 0 || ids[n] >= entries;
    if (!wrong) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t user = 0; user < grad.many; user++)
            add_lookups(ids, &grad, user, (float *)view[1].buf + user * entries * grad.width,
                        (double *)view[2].buf + user);
        Py_END_ALLOW_THREADS
    }
    close_arrays(view, 3);
    PyBuffer_Release(&rows);
    if (wrong)
        return PyErr_Format(PyExc_ValueError, "ids, gradients, tables and squares are not of the same users and rows");
    Py_RETURN_NONE;
}

static PyObject *py_square_by_gram(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
#if !TARGETS
    (void)args, (void)count;
    return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
#else
    if (!expect(count, 3, "square_by_gram"))
        return NULL;
    if (level == 0)
        return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
    Py_buffer sides[2], view;
    Product product;
    if (open_sides(args, sides, &product.left, &product.right) < 0)
        return NULL;
    if (open_array(args[2], &view, 'd', 1) < 0) {
        close_arrays(sides, 2);
        return NULL;
    }
    int64_t users = product.left.many, rows = product.left.rows;
    product.squares = view.buf;
    char *room = NULL;
    int wrong = view.len != 8 * users;
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "the sides and the squares are not of the same users");
    else if ((room = PyMem_RawMalloc(8 * rows * (COLUMNS + 16 * rows) + 64)) == NULL) {
        PyErr_NoMemory();
        wrong = 1;
    }
    else {
        product.dots = (double *)(room + (64 - (uintptr_t)room % 64)); /* where vectors lie in one line of the cache */
        Py_BEGIN_ALLOW_THREADS
        for (int64_t user = 0; user < users; user++)
            (level == 2 ? gram_v4 : gram_v3)(&product, user);
        Py_END_ALLOW_THREADS
    }
    PyMem_RawFree(room);
    PyBuffer_Release(&view);
    close_arrays(sides, 2);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
#endif
}

/* -- tensors, read where they are ------------------------------------------------------------------------------------- */

/* DLPack's view of a tensor, and the table of functions in which a library offers it (dlpack.h, version 1). */
typedef struct {
    void *data;
    int32_t device, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    void *before, *allocate, *share, *wrap;
    int (*view)(void *, Tensor *);
    void *stream;
} Exchange;

static int (*view_of)(void *, Tensor *) = NULL;

/* exchange(capsule): from now on tensors of this library can be read; False if it offers another version. */
static PyObject *py_exchange(PyObject *self, PyObject *capsule)
{
    (void)self;
    const Exchange *offered = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (offered == NULL)
        return NULL;
    if (offered->major != 1 || offered->view == NULL)
        Py_RETURN_FALSE;
    view_of = offered->view;
    Py_RETURN_TRUE;
}

/* Whether a view is of whole words of 32 bits, one behind the other in memory of the CPU; how many. */
static int is_words(const Tensor *view, int64_t *words)
{
    double bits = view->bits * view->lanes;
    int64_t numbers = 1;
    for (int n = view->ndim - 1; n >= 0; n--) {
        if (view->strides != NULL && view->shape[n] != 1 && view->strides[n] != numbers && view->shape[n] != 0)
            return 0;
        numbers *= view->shape[n];
        bits *= (double)view->shape[n];
    }
    *words = (int64_t)(bits / 32);
    return view->device == 1 && bits >= 0 && bits < 9e15 && 32.0 * *words == bits;
}

/* sums_of_tensors(tensors) -> a list of sums of words, or None where a tensor is not such; and whether all numbers of all
tensors are float32 and finite. */
static PyObject *py_sums_of_tensors(PyObject *self, PyObject *tensors)
{
    (void)self;
    if (!PyList_Check(tensors) || view_of == NULL)
        return PyErr_Format(PyExc_TypeError, "expected a list of tensors that can be read");
    PyObject *sums = PyList_New(PyList_GET_SIZE(tensors));
    int all_finite = 1;
    for (Py_ssize_t n = 0; sums != NULL && n < PyList_GET_SIZE(tensors); n++) {
        Tensor view;
        int64_t words, total = 0;
        int finite = 1, plain = view_of(PyList_GET_ITEM(tensors, n), &view) == 0;
        if (!plain)
            PyErr_Clear(); /* it has no memory that can be read: a sparse one, say */
        else if ((plain = is_words(&view, &words) && (view.data != NULL || words == 0)) != 0 && words > 0)
            sum_words((const uint32_t *)((const char *)view.data + view.offset), words, &total, &finite);
        all_finite &= plain && finite && view.code == 2 && view.bits == 32;
        PyObject *sum = plain ? PyLong_FromLongLong(total) : Py_NewRef(Py_None);
        if (sum == NULL)
            Py_CLEAR(sums);
        else
            PyList_SET_ITEM(sums, n, sum);
    }
    return sums == NULL ? NULL : Py_BuildValue("(NO)", sums, all_finite ? Py_True : Py_False);
}

/* Float32 of the CPU without gaps: where they lie, how many, and how many in the last dimension. */
static float *open_tensor(PyObject *tensor, int64_t *numbers, int64_t *width)
{
    Tensor view;
    if (view_of == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "tensors cannot be read here");
        return NULL;
    }
    if (view_of(tensor, &view) != 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "not a tensor that can be read");
        return NULL;
    }
    int plain = view.data != NULL && view.device == 1 && view.code == 2 && view.bits == 32 && view.lanes == 1;
    *numbers = 1;
    for (int n = view.ndim - 1; plain && n >= 0; n--) {
        plain = view.shape[n] > 0 && view.shape[n] <= LONGEST && *numbers <= ((int64_t)1 << 40) &&
                (view.strides == NULL || view.shape[n] == 1 || view.strides[n] == *numbers);
        *numbers *= view.shape[n];
    }
    if (!plain) {
        PyErr_SetString(PyExc_ValueError, "expected float32 on the CPU, some numbers without gaps");
        return NULL;
    }
    *width = view.ndim ? view.shape[view.ndim - 1] : 1;
    return (float *)((char *)view.data + view.offset);
}

/* The rows of users, as many of each, user by user. */
static int open_users(PyObject *tensor, int64_t users, Rows *rows)
{
    int64_t numbers, width;
    const float *base = open_tensor(tensor, &numbers, &width);
    if (base == NULL)
        return -1;
    if (users < 1 || numbers / width % users || numbers / width / users > MANY) {
        PyErr_SetString(PyExc_ValueError, "the rows cannot be divided among the users");
        return -1;
    }
    *rows = (Rows){(const char *)base, users, 0, numbers / width / users, 4 * width, width};
    rows->stride = rows->rows * rows->row_stride;
    return 0;
}

#if TARGETS
/* Users whose rows are measured, multiplied and added up together, by one thread. */
typedef struct {
    int64_t all, first, last;
} Some;

/* One use: its rows are measured into `told`, and multiplied into `written`, unless that is None. */
static int measure_use(PyObject *use, const Some *users, double *told, double *squares)
{
    PyObject *one, *other, *written;
    double reach;
    Product product;
    Span span;
    int64_t numbers, width, given = users->last - users->first;
    if (!PyTuple_Check(use) || !PyArg_ParseTuple(use, "OOOd", &one, &other, &written, &reach))
        return -1;
    if (open_users(one, users->all, &product.left) < 0 || open_users(other, users->all, &product.right) < 0)
        return -1;
    if (product.left.rows != product.right.rows) {
        PyErr_SetString(PyExc_ValueError, "the sides have different rows");
        return -1;
    }
    if (written != Py_None) {
        if ((product.out = open_tensor(written, &numbers, &width)) == NULL)
            return -1;
        if ((double)numbers != (double)users->all * product.left.width * product.right.width) {
            PyErr_SetString(PyExc_ValueError, "the products have another size");
            return -1;
        }
        product.out += users->first * product.left.width * product.right.width;
    }
    product.left.base += users->first * product.left.stride;
    product.right.base += users->first * product.right.stride;
    product.squares = squares;
    product.strip = PyMem_RawMalloc(64 * 2 * (product.left.rows + 1));
    if (product.strip == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    product.last = product.strip + 16 * (product.left.rows + 1);
    Py_BEGIN_ALLOW_THREADS
    if (written != Py_None)
        measure_and_multiply(&product, given, reach < 0 ? NULL : told, reach);
    else
        for (int64_t user = 0; user < given; user++)
            measure_user(&product.left, &product.right, user, told + 3 * user, &span);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(product.strip);
    return 0;
}
#endif

/* One gradient at the results of layers: its rows are added up into a part of each user's row of the matrix. */
static int sum_use(PyObject *use, int64_t users, int64_t first, int64_t last, float *matrix, int64_t across)
{
    PyObject *grad;
    Py_ssize_t place, columns;
    Rows rows;
    if (!PyTuple_Check(use) || !PyArg_ParseTuple(use, "Onn", &grad, &place, &columns))
        return -1;
    if (open_users(grad, users, &rows) < 0)
        return -1;
    if (rows.width != columns || columns > across || place < 0 || place > across - columns) {
        PyErr_SetString(PyExc_ValueError, "no such columns");
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t user = first; user < last; user++)
        sum_rows(&rows, user, matrix + user * across + place);
    Py_END_ALLOW_THREADS
    return 0;
}

/* measure_uses(uses, sums, matrix, users, first, last, told, squares) */
static PyObject *py_measure_uses(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
#if !TARGETS
    (void)args, (void)count;
    return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
#else
    if (!expect(count, 8, "measure_uses"))
        return NULL;
    if (level == 0)
        return PyErr_Format(PyExc_RuntimeError, "not compiled for this processor");
    Some users = {PyLong_AsLongLong(args[3]), PyLong_AsLongLong(args[4]), PyLong_AsLongLong(args[5])};
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[0]) || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "expected two lists");
    if (users.all < 1 || users.all > MANY || users.first < 0 || users.first > users.last || users.last > users.all)
        return PyErr_Format(PyExc_ValueError, "no such users");
    Py_ssize_t uses = PyList_GET_SIZE(args[0]), sums = PyList_GET_SIZE(args[1]);
    int64_t numbers = 0, across = 0;
    float *matrix = NULL;
    if (sums && (matrix = open_tensor(args[2], &numbers, &across)) == NULL)
        return NULL;
    Py_buffer view[2];
    if (open_arrays(args + 6, view, "DD") < 0)
        return NULL;
    int failed = (sums && numbers != users.all * across) || view[0].len != 24 * uses * users.all ||
                 view[1].len != 8 * uses * users.all;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "the results are not of these uses and users");
    for (Py_ssize_t n = 0; !failed && n < uses; n++) {
        int64_t at = n * users.all + users.first;
        failed = measure_use(PyList_GET_ITEM(args[0], n), &users, (double *)view[0].buf + 3 * at,
                             (double *)view[1].buf + at) < 0;
    }
    for (Py_ssize_t n = 0; !failed && n < sums; n++)
        failed = sum_use(PyList_GET_ITEM(args[1], n), users.all, users.first, users.last, matrix, across) < 0;
    close_arrays(view, 2);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
#endif
}

/* add_sums([(written, out, adds)], c, part, parts): a part of the numbers of each out, which c has a factor a user for. */
static PyObject *py_add_sums(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (!expect(count, 4, "add_sums"))
        return NULL;
    int64_t users, width, part = PyLong_AsLongLong(args[2]), parts = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[0]) || parts < 1 || parts > MANY || part < 0 || part >= parts)
        return PyErr_Format(PyExc_ValueError, "expected a list, and a part of parts");
    const float *c = open_tensor(args[1], &users, &width);
    if (c == NULL)
        return NULL;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(args[0]); n++) {
        PyObject *written, *out, *entry = PyList_GET_ITEM(args[0], n);
        int64_t numbers, many;
        int adds;
        float *from, *to;
        if (!PyTuple_Check(entry) || !PyArg_ParseTuple(entry, "OOp", &written, &out, &adds))
            return NULL;
        if ((from = open_tensor(written, &many, &width)) == NULL || (to = open_tensor(out, &numbers, &width)) == NULL)
            return NULL;
        if (many / users != numbers || many % users)
            return PyErr_Format(PyExc_ValueError, "the sum has another size than a user's gradient");
        Py_BEGIN_ALLOW_THREADS
        weigh(from, users, numbers, c, to, adds, numbers * part / parts, numbers * (part + 1) / parts);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"release", (PyCFunction)(void (*)(void))py_release, METH_FASTCALL,
     "release(words, [(address, count)], again, values, first, begin, a, least, most, most_sum, per_grid, divisor)\n"
     "-> how many are undecided, with their places, words and sums, and how many sums the words were enough for"},
    {"put", (PyCFunction)(void (*)(void))py_put, METH_FASTCALL, "put([(address, count)], places, values)"},
    {"hash_words", (PyCFunction)(void (*)(void))py_hash_words, METH_FASTCALL,
     "hash_words([(address, words)], keys, hashes, width) -> how many words"},
    {"sums_of_words", py_sums_of_words, METH_O, "sums_of_words([(address, words)]) -> ([sums], whether all floats are finite)"},
    {"squares_of_rows", (PyCFunction)(void (*)(void))py_squares_of_rows, METH_FASTCALL,
     "squares_of_rows([arrays], squares)"},
    {"measure_rows", (PyCFunction)(void (*)(void))py_measure_rows, METH_FASTCALL,
     "measure_rows([lefts], [rights], out): out[n, b] = total, count and longest side of each user"},
    {"write_products", (PyCFunction)(void (*)(void))py_write_products, METH_FASTCALL,
     "write_products(left, right, out, squares[, told, reach]): out[b] = sum over t of left[b, t] (x) right[b, t], and\n"
     "its squares; told as in measure_rows; False and nothing written if everybody has fewer rows than reach"},
    {"write_ragged", (PyCFunction)(void (*)(void))py_write_ragged, METH_FASTCALL,
     "write_ragged(left, right, counts, out, squares, first, last): write_products of users with unequal numbers of\n"
     "rows, packed user by user; only of those from first to last"},
    {"norm_sums", (PyCFunction)(void (*)(void))py_norm_sums, METH_FASTCALL,
     "norm_sums(x, grad, mean, scale, scaled, summed): sums over t of grad*(x - mean)*scale, and of grad"},
    {"norm_variances", (PyCFunction)(void (*)(void))py_norm_variances, METH_FASTCALL,
     "norm_variances(mean, var, scale, out, weight_var, bias_var, eps)"},
    {"relu_variances", (PyCFunction)(void (*)(void))py_relu_variances, METH_FASTCALL, "relu_variances(mean, var, out)"},
    {"pack_rows", (PyCFunction)(void (*)(void))py_pack_rows, METH_FASTCALL,
     "pack_rows(left, right, lefts, rights): rows whose product is not zero"},
    {"square_lookups", (PyCFunction)(void (*)(void))py_square_lookups, METH_FASTCALL,
     "square_lookups(ids, grad, squares)"},
    {"add_lookups", (PyCFunction)(void (*)(void))py_add_lookups, METH_FASTCALL,
     "add_lookups(ids, grad, out, squares): out[b, ids[b, t]] += grad[b, t], and the squares of out[b] follow"},
    {"square_by_gram", (PyCFunction)(void (*)(void))py_square_by_gram, METH_FASTCALL,
     "square_by_gram(left, right, squares): the squares of what write_products would write"},
    {"exchange", py_exchange, METH_O, "exchange(capsule) -> whether tensors can be read by measure_uses and add_sums"},
    {"sums_of_tensors", py_sums_of_tensors, METH_O,
     "sums_of_tensors([tensors]) -> ([sums, or None], whether all numbers are float32 and finite)"},
    {"measure_uses", (PyCFunction)(void (*)(void))py_measure_uses, METH_FASTCALL,
     "measure_uses([(left, right, written, reach)], [(grad, place, columns)], matrix, users, first, last, told, squares):\n"
     "write_products of many uses, for users from first to last, and sums of users' rows into columns of the matrix;\n"
     "without `written` rows are only measured, with a negative reach only multiplied"},
    {"add_sums", (PyCFunction)(void (*)(void))py_add_sums, METH_FASTCALL,
     "add_sums([(written, out, adds)], c, part, parts): out (+)= sum over users of c[b]*written[b], some of its numbers"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
#if TARGETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        level = 1;
    if (level && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        level = 2;
#endif
    PyObject *made = PyModule_Create(&module);
#if TARGETS
    int multiplies = level > 0;
#else
    int multiplies = 0;
#endif
    if (made != NULL && PyModule_AddIntConstant(made, "multiplies", multiplies) < 0)
        Py_CLEAR(made);
    return made;
}
