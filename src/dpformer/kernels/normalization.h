/* Layer norms: gradients of users, and variances through a layer norm and ReLU (see reattention/). */

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
