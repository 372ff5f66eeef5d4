/* The products of one user's rows, NAME, for one kind of processor: TARGET, vectors of BYTES bytes,
tiles of MOST rows and PAIR vectors. */

typedef float OF(vector) __attribute__((vector_size(BYTES), aligned(4)));

TARGET INLINE void OF(tile)(const int mr, const int nr, const int turned, const float *strip,
                               int64_t strip_stride, const float *vectors, int64_t stride, int64_t rows,
                               float *out, int64_t out_stride, int64_t columns, OF(vector) *square)
{
    const int width = BYTES / 4;
    OF(vector) sum[MOST][PAIR];
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nr; j++)
            sum[i][j] = (OF(vector)){0};
    for (int64_t t = 0; t < rows; t++, strip += strip_stride, vectors += stride) {
        OF(vector) some[PAIR];
        for (int j = 0; j < nr; j++)
            some[j] = *(const OF(vector) *)(vectors + j * width);
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nr; j++)
                sum[i][j] += strip[i] * some[j];
    }
    OF(vector) part[4] = {*square, {0}, {0}, {0}};
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nr; j++)
            part[(i * nr + j) % 4] += sum[i][j] * sum[i][j];
    *square = (part[0] + part[1]) + (part[2] + part[3]);
    if (!turned && columns == nr * width) {
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nr; j++)
                *(OF(vector) *)(out + i * out_stride + j * width) = sum[i][j];
        return;
    }
    for (int j = 0; j < nr; j++)
        for (int k = 0; k < width && j * width + k < columns; k++)
            for (int i = 0; i < mr; i++)
                out[turned ? (j * width + k) * out_stride + i : i * out_stride + j * width + k] = sum[i][j][k];
}

/* mr columns of one side, from c on, times all of the other. */
TARGET INLINE double OF(strip)(const int mr, const int turned, const Product *product, int64_t user, int64_t c,
                                  const float *from, int64_t from_stride)
{
    const int width = BYTES / 4;
    const Rows *one = turned ? &product->right : &product->left, *other = turned ? &product->left : &product->right;
    const float *vectors = row_of(other, user, 0);
    int64_t stride = other->row_stride / 4, wide = other->width, rows = one->rows, p = 0;
    int64_t out_stride = product->right.width, step = turned ? out_stride : 1;
    float *out = product->out + user * one->width * wide + c * (turned ? 1 : out_stride);
    OF(vector) square = {0};
    double total = 0;
    for (; p + PAIR * width <= wide; p += PAIR * width) {
        OF(tile)(mr, PAIR, turned, from, from_stride, vectors + p, stride, rows, out + p * step, out_stride,
                    PAIR * width, &square);
        if (p % (64 * PAIR * width) == 0) { /* long sums are in float64 */
            for (int k = 0; k < width; k++)
                total += square[k];
            square = (OF(vector)){0};
        }
    }
    for (; p + width <= wide; p += width)
        OF(tile)(mr, 1, turned, from, from_stride, vectors + p, stride, rows, out + p * step, out_stride, width,
                    &square);
    if (p < wide)
        OF(tile)(mr, 1, turned, from, from_stride, product->last, width, rows, out + p * step, out_stride,
                    wide - p, &square);
    for (int k = 0; k < width; k++)
        total += square[k];
    return total;
}

/* One copy each of the code for MOST columns: two might round the squares differently. */
TARGET static ALONE double OF(most)(const Product *product, int64_t user, int64_t c, const float *from,
                                       int64_t from_stride)
{
    return OF(strip)(MOST, 0, product, user, c, from, from_stride);
}

TARGET static ALONE double OF(most_turned)(const Product *product, int64_t user, int64_t c, const float *from,
                                              int64_t from_stride)
{
    return OF(strip)(MOST, 1, product, user, c, from, from_stride);
}

TARGET INLINE double OF(sides)(const int turned, const Product *product, int64_t user)
{
    const int width = BYTES / 4;
    const Rows *one = turned ? &product->right : &product->left, *other = turned ? &product->left : &product->right;
    int64_t high = one->width, wide = other->width, c = 0, p = wide - wide % width;
    double total = 0;
    for (int64_t t = 0; p < wide && t < other->rows; t++)
        for (int k = 0; k < width; k++)
            product->last[t * width + k] = p + k < wide ? row_of(other, user, t)[p + k] : 0.0f;
    const float *from = row_of(one, user, 0);
    int64_t stride = one->row_stride / 4, rows = one->rows;
    for (; c + MOST <= high; c += MOST) {
        const float *here = from + c;
        int64_t step = stride;
        if (FAR_AHEAD(stride))
            for (int64_t t = 0, next = c + AHEAD < high ? AHEAD : high - 1 - c; t < rows; t++)
                FETCH(here + t * stride + next);
        if (FAR(rows, stride)) {
            float *to = product->strip;
            if (c + width <= high)
                for (int64_t t = 0; t < rows; t++) /* a few columns more than are needed: one vector per row */
                    *(OF(vector) *)(to + t * width) = *(const OF(vector) *)(here + t * stride);
            else
                for (int64_t t = 0; t < rows; t++)
                    memcpy(to + t * width, here + t * stride, MOST * sizeof(float));
            here = to;
            step = width;
        }
        total += (turned ? OF(most_turned) : OF(most))(product, user, c, here, step);
    }
    for (; MOST > 8 && c + 8 <= high; c += 8)
        total += OF(strip)(MOST > 8 ? 8 : 4, turned, product, user, c, from + c, stride);
    for (; c + 4 <= high; c += 4)
        total += OF(strip)(4, turned, product, user, c, from + c, stride);
    for (; c < high; c++)
        total += OF(strip)(1, turned, product, user, c, from + c, stride);
    return total;
}

TARGET static void NAME(const Product *product, int64_t user)
{
    int turned = product->right.width < BYTES / 4 && product->left.width > product->right.width;
    product->squares[user] = turned ? OF(sides)(1, product, user) : OF(sides)(0, product, user);
}

#undef NAME
#undef TARGET
#undef BYTES
#undef MOST
#undef PAIR
