/* Looks at Python objects that every torch call, or every step, takes: what sort of tensors a call was given, whether a
model holds what it held. Each function has a twin in Python that says the same (clipping/ordinary.py,
clipping/registered.py), which does the work where nothing was compiled.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *tensor_type, *public_mark, *turned_mark, *picked_mark, *computed_mark, *requires_grad;

static int is_tensor(PyObject *value)
{
    return PyObject_TypeCheck(value, (PyTypeObject *)tensor_type);
}

/* Appends the tensors in nested tuples, lists and dicts, as trees.tensors_of does. */
static int collect(PyObject *tree, PyObject *found)
{
    int failed = 0;
    if (is_tensor(tree))
        return PyList_Append(found, tree);
    if (Py_EnterRecursiveCall(" in nested arguments"))
        return -1;
    if (PyTuple_Check(tree) || PyList_Check(tree)) {
        for (Py_ssize_t n = 0; !failed && n < PySequence_Fast_GET_SIZE(tree); n++)
            failed = collect(PySequence_Fast_GET_ITEM(tree, n), found);
    }
    else if (PyDict_Check(tree)) {
        Py_ssize_t place = 0;
        PyObject *key, *value;
        while (!failed && PyDict_Next(tree, &place, &key, &value))
            failed = collect(value, found);
    }
    Py_LeaveRecursiveCall();
    return failed;
}

static int has_id(PyObject *home, PyObject *value, int is_set)
{
    PyObject *id = PyLong_FromVoidPtr(value);
    if (id == NULL)
        return -1;
    int found = is_set ? PySet_Contains(home, id) : PyDict_Contains(home, id);
    Py_DECREF(id);
    return found;
}

static int is_set_to_true(PyObject *dict, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(dict, name);
    return value == NULL ? (PyErr_Occurred() ? -1 : 0) : PyObject_IsTrue(value);
}

/* Whether there is more to be said of a tensor than that its rows are users' in order. */
static int is_marked(PyObject *tensor)
{
    PyObject *dict = PyObject_GenericGetDict(tensor, NULL);
    if (dict == NULL)
        return -1;
    int marked = 0;
    if (PyDict_GET_SIZE(dict) > 0) {
        marked = is_set_to_true(dict, public_mark);
        if (marked == 0)
            marked = is_set_to_true(dict, turned_mark);
        if (marked == 0) {
            PyObject *how = PyDict_GetItemWithError(dict, picked_mark);
            marked = how != NULL ? how != Py_None : (PyErr_Occurred() ? -1 : 0);
        }
    }
    Py_DECREF(dict);
    return marked;
}

/* 1: rows of users; 0: a frozen tensor of the model; 2: something else; -1: an error. */
static int sort_of(PyObject *tensor, PyObject *own, PyObject *constants)
{
    int is_own = has_id(own, tensor, 1);
    if (is_own < 0)
        return -1;
    if (is_own) {
        PyObject *trained = PyObject_GetAttr(tensor, requires_grad);
        int is_trained = trained == NULL ? -1 : PyObject_IsTrue(trained);
        Py_XDECREF(trained);
        return is_trained == 1 ? 2 : is_trained;
    }
    if ((PyObject *)Py_TYPE(tensor) != tensor_type)
        return 2;
    int is_constant = has_id(constants, tensor, 0);
    if (is_constant)
        return is_constant < 0 ? -1 : 2;
    int marked = is_marked(tensor);
    return marked < 0 ? -1 : marked ? 2 : 1;
}

static PyObject *of_users(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 4 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1]) || !PySet_Check(args[2]) ||
        !PyDict_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "expected a tuple, a dict, a set and a dict");
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    int some = 0, sort = collect(args[0], found) < 0 || collect(args[1], found) < 0 ? -1 : 0;
    for (Py_ssize_t n = 0; (sort == 0 || sort == 1) && n < PyList_GET_SIZE(found); n++) {
        sort = sort_of(PyList_GET_ITEM(found, n), args[2], args[3]);
        some |= sort == 1;
    }
    if (sort >= 0 && sort < 2 && some)
        return found;
    Py_DECREF(found);
    if (sort < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *mark_computed(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "expected what was computed, and a list of tensors");
    PyObject *made = PyList_New(0);
    if (made == NULL)
        return NULL;
    int failed = collect(args[0], made);
    for (Py_ssize_t n = 0; !failed && n < PyList_GET_SIZE(made); n++) {
        PyObject *tensor = PyList_GET_ITEM(made, n);
        int given = 0;
        for (Py_ssize_t m = 0; !given && m < PyList_GET_SIZE(args[1]); m++)
            given = PyList_GET_ITEM(args[1], m) == tensor;
        if (!given)
            failed = PyObject_SetAttr(tensor, computed_mark, Py_True);
    }
    Py_DECREF(made);
    return failed ? NULL : Py_NewRef(args[0]);
}

/* Whether a dictionary of a module is the same one, with the same names and the same objects in the same order. */
static int is_same(PyObject *seen)
{
    PyObject *module, *kind, *home, *names, *values, *key, *value;
    if (!PyTuple_Check(seen)) {
        PyErr_SetString(PyExc_TypeError, "expected tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(seen, "OUO!O!O!", &module, &kind, &PyDict_Type, &home, &PyList_Type, &names, &PyList_Type,
                          &values))
        return -1;
    PyObject *now = PyObject_GetAttr(module, kind);
    if (now == NULL)
        return -1;
    Py_DECREF(now); /* the module holds it */
    Py_ssize_t size = PyDict_GET_SIZE(home), place = 0;
    if (now != home || PyList_GET_SIZE(names) != size || PyList_GET_SIZE(values) != size)
        return 0;
    for (Py_ssize_t n = 0; PyDict_Next(home, &place, &key, &value); n++) {
        if (value != PyList_GET_ITEM(values, n))
            return 0;
        if (key != PyList_GET_ITEM(names, n)) {
            int equal = PyObject_RichCompareBool(key, PyList_GET_ITEM(names, n), Py_EQ);
            if (equal != 1)
                return equal;
        }
    }
    return 1;
}

static PyObject *are_same(PyObject *self, PyObject *seen)
{
    (void)self;
    if (!PyList_Check(seen))
        return PyErr_Format(PyExc_TypeError, "expected a list");
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(seen); n++) {
        int same = is_same(PyList_GET_ITEM(seen, n));
        if (same < 0)
            return NULL;
        if (!same)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"of_users", (PyCFunction)(void (*)(void))of_users, METH_FASTCALL,
     "of_users(args, kwargs, own, constants) -> the tensors, if they are rows of users in order; or None"},
    {"mark_computed", (PyCFunction)(void (*)(void))mark_computed, METH_FASTCALL,
     "mark_computed(out, given) -> out, whose tensors are marked unless they were given"},
    {"are_same", are_same, METH_O, "are_same([(module, kind, home, names, values)]) -> whether nothing has changed"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_objects", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__objects(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    tensor_type = torch == NULL ? NULL : PyObject_GetAttrString(torch, "Tensor");
    Py_XDECREF(torch);
    public_mark = PyUnicode_InternFromString("_phantom_public");
    turned_mark = PyUnicode_InternFromString("_phantom_turned");
    picked_mark = PyUnicode_InternFromString("_phantom_picked");
    computed_mark = PyUnicode_InternFromString("_phantom_computed");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    if (tensor_type == NULL || !PyType_Check(tensor_type) || !public_mark || !turned_mark || !picked_mark ||
        !computed_mark || !requires_grad) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ImportError, "torch.Tensor is no type");
        return NULL;
    }
    return PyModule_Create(&module);
}
