/* Arguments from Python: arrays by the buffer protocol, and memory by address and length. */

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
