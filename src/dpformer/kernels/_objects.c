/* Looks at Python objects that every torch call, or every step, takes: what sort of tensors a call was given, whether a
model holds what it held. Each function has a twin in Python that says the same (clipping/ordinary.py,
clipping/registered.py, clipping/gate.py), which does the work where nothing was compiled.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *tensor_type, *parameter_type, *public_mark, *turned_mark, *picked_mark, *computed_mark, *requires_grad;
static PyObject *own_name, *constants_name, *names_name, *is_leaf, *ndim, *otherwise, *look, *affine, *classify, *out_name;
static PyObject *kinds, *compiling, *interpreters;

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

/* The tensors in arguments, if they are rows of users in order; NULL if not, and perhaps an error. */
static PyObject *given_of(PyObject *args, PyObject *kwargs, PyObject *own, PyObject *constants)
{
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    int some = 0, sort = collect(args, found) < 0 || (kwargs && collect(kwargs, found) < 0) ? -1 : 0;
    for (Py_ssize_t n = 0; (sort == 0 || sort == 1) && n < PyList_GET_SIZE(found); n++) {
        sort = sort_of(PyList_GET_ITEM(found, n), own, constants);
        some |= sort == 1;
    }
    if (sort >= 0 && sort < 2 && some)
        return found;
    Py_DECREF(found);
    return NULL;
}

static PyObject *of_users(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 4 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1]) || !PySet_Check(args[2]) ||
        !PyDict_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "expected a tuple, a dict, a set and a dict");
    PyObject *found = given_of(args[0], args[1], args[2], args[3]);
    if (found != NULL || PyErr_Occurred())
        return found;
    Py_RETURN_NONE;
}

/* Marks the tensors in what was computed, unless they were given. */
static int mark(PyObject *out, PyObject *given)
{
    PyObject *made = PyList_New(0);
    if (made == NULL)
        return -1;
    int failed = collect(out, made);
    for (Py_ssize_t n = 0; !failed && n < PyList_GET_SIZE(made); n++) {
        PyObject *tensor = PyList_GET_ITEM(made, n);
        int is_given = 0;
        for (Py_ssize_t m = 0; !is_given && m < PyList_GET_SIZE(given); m++)
            is_given = PyList_GET_ITEM(given, m) == tensor;
        if (!is_given)
            failed = PyObject_SetAttr(tensor, computed_mark, Py_True);
    }
    Py_DECREF(made);
    return failed;
}

static PyObject *mark_computed(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !PyList_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "expected what was computed, and a list of tensors");
    return mark(args[0], args[1]) ? NULL : Py_NewRef(args[0]);
}

/* -- the gate's short ways ------------------------------------------------------------------------------------------ */

/* What Gate.classify says of a function. */
enum { OTHER, SIZE, ORDINARY, MOVES, SHAPE, TRANSPOSE, COPY, LINEAR, ADDMM };

static int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return truth;
}

static int is_computed(PyObject *tensor)
{
    PyObject *dict = PyObject_GenericGetDict(tensor, NULL);
    int computed = dict == NULL ? -1 : is_set_to_true(dict, computed_mark);
    Py_XDECREF(dict);
    return computed;
}

/* Whether a function of no arguments says None. */
static int says_none(PyObject *function)
{
    PyObject *said = PyObject_CallNoArgs(function);
    int none = said == NULL ? -1 : said == Py_None;
    Py_XDECREF(said);
    return none;
}

/* The dimension as it is counted from the first one; -1 if it is none. */
static Py_ssize_t dimension(PyObject *value, Py_ssize_t dimensions)
{
    if (!PyLong_CheckExact(value))
        return -1;
    Py_ssize_t dim = PyLong_AsSsize_t(value);
    if (dim == -1 && PyErr_Occurred())
        PyErr_Clear();
    dim = dim < 0 ? dim + dimensions : dim;
    return dim < dimensions ? dim : -1;
}

/* x.transpose(i, j) that leaves the batch where it is. */
static int leaves_batch(PyObject *args)
{
    if (PyTuple_GET_SIZE(args) != 3)
        return 0;
    PyObject *value = PyObject_GetAttr(PyTuple_GET_ITEM(args, 0), ndim);
    Py_ssize_t dimensions = value == NULL ? -1 : PyLong_AsSsize_t(value);
    Py_XDECREF(value);
    if (dimensions < 0)
        return -1;
    return dimension(PyTuple_GET_ITEM(args, 1), dimensions) > 0 && dimension(PyTuple_GET_ITEM(args, 2), dimensions) > 0;
}

/* x.view(n, ...) or x.view((n, ...)) with n other than one. */
static int has_first_size(PyObject *args)
{
    if (PyTuple_GET_SIZE(args) < 2)
        return 0;
    PyObject *first = PyTuple_GET_ITEM(args, 1);
    if (PyTuple_Check(first) && PyTuple_GET_SIZE(args) == 2 && PyTuple_GET_SIZE(first) > 0)
        first = PyTuple_GET_ITEM(first, 0);
    if (!PyLong_CheckExact(first))
        return 0;
    long long size = PyLong_AsLongLong(first);
    if (size == -1 && PyErr_Occurred())
        PyErr_Clear();
    return size != 1;
}

/* 1: a parameter that is trained; 0: a tensor of the model that is not; 2: neither; -1: an error. */
static int is_trained(PyObject *tensor, PyObject *own, PyObject *names)
{
    if ((PyObject *)Py_TYPE(tensor) != parameter_type && (PyObject *)Py_TYPE(tensor) != tensor_type)
        return 2;
    int is_own = has_id(own, tensor, 1);
    if (is_own != 1)
        return is_own < 0 ? -1 : 2;
    int trained = is_true(tensor, requires_grad);
    if (trained != 1)
        return trained;
    int named = has_id(names, tensor, 0), leaf = named == 1 ? is_true(tensor, is_leaf) : named;
    return leaf < 0 ? -1 : leaf ? 1 : 2;
}

/* A linear layer on rows of users in order that were computed inside the context, with a trained parameter: it is
recorded by gate.affine(func, x, weight, bias, trains_weight, trains_bias). NULL without an error: it is not such a one. */
static PyObject *affine_of(PyObject *gate, PyObject *func, PyObject *args, int columns, PyObject *own, PyObject *names,
                           PyObject *constants, int *frozen)
{
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    *frozen = 0;
    if (columns ? count != 3 : count < 2 || count > 3)
        return NULL;
    PyObject *x = PyTuple_GET_ITEM(args, columns ? 1 : 0), *weight = PyTuple_GET_ITEM(args, columns ? 2 : 1);
    PyObject *bias = columns ? PyTuple_GET_ITEM(args, 0) : count == 3 ? PyTuple_GET_ITEM(args, 2) : Py_None;
    if ((PyObject *)Py_TYPE(x) != tensor_type || !is_tensor(weight) || (bias != Py_None && !is_tensor(bias)))
        return NULL;
    int trains = is_trained(weight, own, names), trains_bias = bias == Py_None ? 0 : is_trained(bias, own, names);
    if (trains < 0 || trains_bias < 0 || trains > 1 || trains_bias > 1)
        return NULL;
    *frozen = !trains && !trains_bias;
    if (*frozen || sort_of(x, own, constants) != 1 || is_computed(x) != 1)
        return NULL;
    PyObject *flags[] = {trains ? Py_True : Py_False, trains_bias ? Py_True : Py_False};
    return PyObject_CallMethodObjArgs(gate, affine, func, x, weight, bias, flags[0], flags[1], NULL);
}

/* What Gate.classify says of a function, remembered; -1: an error. */
static long kind_of(PyObject *gate, PyObject *func)
{
    PyObject *kind = PyDict_GetItemWithError(kinds, func);
    if (kind != NULL)
        return PyLong_AsLong(kind);
    if (PyErr_Occurred() || (kind = PyObject_CallMethodOneArg(gate, classify, func)) == NULL)
        return -1;
    if (PyDict_GET_SIZE(kinds) >= 4096) /* of functions that were made for one call each */
        PyDict_Clear(kinds);
    long value = PyDict_SetItem(kinds, func, kind) < 0 ? -1 : PyLong_AsLong(kind);
    Py_DECREF(kind);
    return value;
}

/* 1: the function needs no other look than at what it was given; 0: it needs one; -1: an error. */
static int is_plain_call(long kind, PyObject *args, PyObject *kwargs)
{
    if (kind == ORDINARY || kind == MOVES || kind == LINEAR || kind == ADDMM)
        return 1;
    if (PyTuple_GET_SIZE(args) == 0 || !is_tensor(PyTuple_GET_ITEM(args, 0)))
        return 0;
    if (kind == COPY)
        return is_computed(PyTuple_GET_ITEM(args, 0));
    if (kwargs && PyDict_GET_SIZE(kwargs) > 0)
        return 0;
    return kind == SHAPE ? has_first_size(args) : leaves_batch(args);
}

/* Runs a function of rows of users in order, and marks what it gives. 0: it was given something else. */
static int run_plain(PyObject *gate, long kind, PyObject *func, PyObject *args, PyObject *kwargs, PyObject *own,
                     PyObject *constants, PyObject **out)
{
    PyObject *given = given_of(args, kwargs, own, constants), *looked;
    if (given == NULL)
        return PyErr_Occurred() != NULL;
    if (kind == MOVES) {
        PyObject *named = kwargs ? Py_NewRef(kwargs) : PyDict_New();
        looked = named == NULL ? NULL : PyObject_CallMethodObjArgs(gate, look, func, args, named, NULL);
        Py_XDECREF(named);
        if (looked == NULL) {
            Py_DECREF(given);
            return 1;
        }
        Py_DECREF(looked);
    }
    *out = PyObject_Call(func, args, kwargs);
    if (*out != NULL && mark(*out, given))
        Py_CLEAR(*out);
    Py_DECREF(given);
    return 1;
}

/* 1: done, with a result or an error; 0: Python is asked, nothing has happened. */
static int short_way(PyObject *gate, PyObject *func, PyObject *args, PyObject *kwargs, PyObject **out)
{
    long kind = kind_of(gate, func);
    if (kind <= OTHER)
        return kind < 0;
    int quiet = says_none(compiling); /* inside torch.compile nothing is short */
    if (quiet != 1)
        return quiet < 0;
    if (kind == SIZE) {
        PyObject *type = PyTuple_GET_SIZE(args) == 0 ? NULL : (PyObject *)Py_TYPE(PyTuple_GET_ITEM(args, 0));
        if (type == NULL || (type != tensor_type && type != parameter_type))
            return 0;
        *out = PyObject_Call(func, args, kwargs);
        return 1;
    }
    quiet = says_none(interpreters); /* nor under vmap, where tensors have no marks */
    if (quiet != 1)
        return quiet < 0;
    int written = kwargs ? PyDict_Contains(kwargs, out_name) : 0, plain = 0, done = 0, frozen = 1;
    if (written || (plain = is_plain_call(kind, args, kwargs)) != 1)
        return written < 0 || plain < 0;
    PyObject *own = PyObject_GetAttr(gate, own_name), *constants = PyObject_GetAttr(gate, constants_name);
    PyObject *names = PyObject_GetAttr(gate, names_name);
    if (own == NULL || constants == NULL || names == NULL || !PySet_Check(own) || !PyDict_Check(constants) ||
        !PyDict_Check(names)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a gate has a set and two dicts");
        done = 1;
    }
    else if (kind == LINEAR || kind == ADDMM) {
        if (!kwargs || PyDict_GET_SIZE(kwargs) == 0)
            *out = affine_of(gate, func, args, kind == ADDMM, own, names, constants, &frozen);
        else
            frozen = 0;
        if (*out == Py_None)
            Py_CLEAR(*out);
        done = *out != NULL || PyErr_Occurred() != NULL;
    }
    if (!done && frozen)
        done = run_plain(gate, kind, func, args, kwargs, own, constants, out);
    Py_XDECREF(own);
    Py_XDECREF(constants);
    Py_XDECREF(names);
    return done;
}

/* Gate.__torch_function__(gate, func, types, args, kwargs). */
static PyObject *passage(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    (void)self;
    if (count < 3 || count > 5 || (count > 3 && !PyTuple_Check(given[3])))
        return PyErr_Format(PyExc_TypeError, "expected a gate, a function, types, a tuple and perhaps a dict");
    PyObject *kwargs = count > 4 && given[4] != Py_None ? given[4] : NULL, *out = NULL;
    if (count > 3 && (kwargs == NULL || PyDict_Check(kwargs)) && short_way(given[0], given[1], given[3], kwargs, &out))
        return out;
    PyObject *const *rest = given;
    return PyObject_CallMethodObjArgs(rest[0], otherwise, rest[1], rest[2], count > 3 ? rest[3] : NULL, kwargs, NULL);
}

/* found(kinds, get_eval_frame_callback, peek_interpreter_stack, Parameter): what the gate asks, told once. */
static PyObject *tell(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 4 || !PyDict_Check(args[0]) || !PyType_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "expected a dict, two functions and a type");
    PyObject **places[] = {&kinds, &compiling, &interpreters, &parameter_type};
    for (int n = 0; n < 4; n++)
        Py_XSETREF(*places[n], Py_NewRef(args[n]));
    Py_RETURN_NONE;
}

/* Whether a dictionary of a module is the same one, with the same names and the same objects in the same order. */
static int is_same(PyObject *seen)
{
    PyObject *key, *value;
    if (!PyTuple_Check(seen) || PyTuple_GET_SIZE(seen) != 5) {
        PyErr_SetString(PyExc_TypeError, "expected tuples of five");
        return -1;
    }
    PyObject *module = PyTuple_GET_ITEM(seen, 0), *kind = PyTuple_GET_ITEM(seen, 1), *home = PyTuple_GET_ITEM(seen, 2);
    PyObject *names = PyTuple_GET_ITEM(seen, 3), *values = PyTuple_GET_ITEM(seen, 4);
    if (!PyUnicode_Check(kind) || !PyDict_Check(home) || !PyList_Check(names) || !PyList_Check(values)) {
        PyErr_SetString(PyExc_TypeError, "expected a module, a name, a dict and two lists");
        return -1;
    }
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
    {"tell", (PyCFunction)(void (*)(void))tell, METH_FASTCALL,
     "tell(kinds, get_eval_frame_callback, peek_interpreter_stack, Parameter): before a passage"},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef of_gates = {"passage", (PyCFunction)(void (*)(void))passage, METH_FASTCALL,
                               "passage(func, types, args, kwargs): a method of a Gate, its __torch_function__"};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_objects", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__objects(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    tensor_type = torch == NULL ? NULL : PyObject_GetAttrString(torch, "Tensor");
    Py_XDECREF(torch);
    struct {
        PyObject **place;
        const char *text;
    } words[] = {
        {&public_mark, "_phantom_public"}, {&turned_mark, "_phantom_turned"}, {&picked_mark, "_phantom_picked"},
        {&computed_mark, "_phantom_computed"}, {&requires_grad, "requires_grad"}, {&own_name, "own"},
        {&constants_name, "constants"}, {&names_name, "names"}, {&is_leaf, "is_leaf"}, {&ndim, "ndim"},
        {&otherwise, "in_python"}, {&look, "look"}, {&affine, "affine"}, {&classify, "classify"}, {&out_name, "out"},
    };
    int failed = 0;
    for (size_t n = 0; n < sizeof words / sizeof *words; n++)
        failed |= (*words[n].place = PyUnicode_InternFromString(words[n].text)) == NULL;
    if (failed || tensor_type == NULL || !PyType_Check(tensor_type)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ImportError, "torch.Tensor is no type");
        return NULL;
    }
    PyObject *made = PyModule_Create(&module), *function = made == NULL ? NULL : PyCFunction_New(&of_gates, NULL);
    PyObject *method = function == NULL ? NULL : PyInstanceMethod_New(function); /* it becomes one of its class */
    Py_XDECREF(function);
    if (method == NULL || PyModule_AddObjectRef(made, "passage", method) < 0)
        Py_CLEAR(made);
    Py_XDECREF(method);
    return made;
}
