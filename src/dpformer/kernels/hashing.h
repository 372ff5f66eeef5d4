/* Keyed hashes of words, and sums of their bits: see noise/fingerprint.py and kernels/checksum.py. */

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
