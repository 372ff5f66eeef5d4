/* Rows of users: their squares and lengths, and rows of a table read by index. */

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
