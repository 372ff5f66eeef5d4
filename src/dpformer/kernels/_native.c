/* Passes over memory that NumPy and torch take several for: noise, hashes, sums of bits, squares of rows.

Every function here has a twin in Python that gives the same (noise/noisy_sums.py, noise/fingerprint.py,
kernels/checksum.py) or as exact numbers (clipping/rounding.py), and kernels/native.py says whether this one is there. Where
no compiler is, the twins do the work. Nothing secret is kept here, and nothing is drawn: random words come from OpenSSL.

Loops are plain, so that compilers turn them into vector instructions. One file per subject; all are compiled together.
*/

#include "common.h"
#include "arguments.h"
#include "noise.h"
#include "hashing.h"
#include "rows.h"
#include "products.h"
#include "normalization.h"
#include "tensors.h"

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
