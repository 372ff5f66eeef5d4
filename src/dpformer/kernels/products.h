/* Gradients of users as products of their rows, their squares, and the clipped sum. */

#define JOINED(name, part) name##_##part
#define JOIN(name, part) JOINED(name, part)
#define OF(part) JOIN(NAME, part)

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

/* Per user, without its gradient: the sum over t and u of (left_t . left_u)*(right_t . right_u), in float64. */
#define COLUMNS 512

#if TARGETS
#define NAME product_v4
#define TARGET V4
#define BYTES 64
#define MOST 12
#define PAIR 2
#include "product_template.h"

#define NAME product_v3
#define TARGET V3
#define BYTES 32
#define MOST 6
#define PAIR 2
#include "product_template.h"

#define NAME gram_v4
#define TARGET V4
#define COUNT 8
#define EACH 4
#include "gram_template.h"

#define NAME gram_v3
#define TARGET V3
#define COUNT 4
#define EACH 3
#include "gram_template.h"
#endif

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
