/* The square of one user's product, NAME, from inner products of its rows, for one kind of processor: TARGET,
vectors of COUNT numbers, blocks of EACH rows. */

typedef double OF(wide) __attribute__((vector_size(8 * COUNT), aligned(8)));

/* Adds inner products of EACH rows from i on with EACH rows from j on; rows after the last one count for nothing. */
TARGET INLINE void OF(block)(const double *some, int64_t columns, int64_t rows, int64_t i, int64_t j,
                                OF(wide) *dots)
{
    const double *one[EACH], *other[EACH];
    OF(wide) sum[EACH][EACH];
    for (int a = 0; a < EACH; a++) {
        one[a] = some + COLUMNS * (i + a < rows ? i + a : rows - 1);
        other[a] = some + COLUMNS * (j + a < rows ? j + a : rows - 1);
        for (int b = 0; b < EACH; b++)
            sum[a][b] = (OF(wide)){0};
    }
    for (int64_t c = 0; c < columns; c += COUNT) {
        OF(wide) row[EACH];
        for (int b = 0; b < EACH; b++)
            row[b] = *(const OF(wide) *)(other[b] + c);
        for (int a = 0; a < EACH; a++)
            for (int b = 0; b < EACH; b++)
                sum[a][b] += *(const OF(wide) *)(one[a] + c) * row[b];
    }
    for (int a = 0; a < EACH && i + a < rows; a++)
        for (int b = 0; b < EACH && j + b < rows; b++)
            dots[(i + a) * rows + j + b] += sum[a][b];
}

/* Inner products of all rows; columns that are in the cache, in float64, meet all of them. */
TARGET INLINE void OF(dots)(const Rows *rows, int64_t user, double *some, OF(wide) *dots)
{
    int64_t count = rows->rows;
    for (int64_t n = 0; n < count * count; n++)
        dots[n] = (OF(wide)){0};
    for (int64_t c = 0; c < rows->width; c += COLUMNS) {
        int64_t here = rows->width - c < COLUMNS ? rows->width - c : COLUMNS;
        int64_t filled = (here + COUNT - 1) / COUNT * COUNT;
        for (int64_t t = 0; t < count; t++) {
            const float *row = row_of(rows, user, t) + c;
            for (int64_t k = 0; k < here; k++)
                some[t * COLUMNS + k] = row[k];
            memset(some + t * COLUMNS + here, 0, (filled - here) * sizeof(double));
        }
        for (int64_t i = 0; i < count; i += EACH)
            for (int64_t j = 0; j <= i; j += EACH)
                OF(block)(some, filled, count, i, j, dots);
    }
}

TARGET static void NAME(const Product *product, int64_t user)
{
    int64_t rows = product->left.rows;
    double *some = product->dots, total = 0;
    OF(wide) *lefts = (OF(wide) *)(some + COLUMNS * rows), *rights = lefts + rows * rows;
    if (rows == 1)
        total = square_of_row(row_of(&product->left, user, 0), product->left.width) *
                square_of_row(row_of(&product->right, user, 0), product->right.width);
    else {
        OF(dots)(&product->left, user, some, lefts);
        OF(dots)(&product->right, user, some, rights);
        for (int64_t t = 0; t < rows; t++)
            for (int64_t u = 0; u <= t; u++) {
                double left = 0, right = 0;
                for (int k = 0; k < COUNT; k++) {
                    left += lefts[t * rows + u][k];
                    right += rights[t * rows + u][k];
                }
                total += (u < t ? 2 : 1) * left * right;
            }
    }
    product->squares[user] = total;
}

#undef NAME
#undef TARGET
#undef COUNT
#undef EACH
