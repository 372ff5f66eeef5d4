/* Tensors of torch, read where they are through DLPack. */

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

/* add_sums([(written, out, adds)], c, part, parts): some numbers of each out; c has one factor per user. */
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
