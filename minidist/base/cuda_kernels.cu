// The sum of `value` over the threads of a block, in the same order in every run.
template <typename T> __device__ T block_sum(T value) {
    __shared__ T of_warp[32];
    for (int offset = 16; offset; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
    __syncthreads();  // every thread has read the sum before this one
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    T total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += of_warp[warp];
    return total;
}

// The largest `value` of the threads of a block.
template <typename T> __device__ T block_max(T value) {
    __shared__ T of_warp[32];
    for (int offset = 16; offset; offset /= 2) value = max(value, __shfl_down_sync(0xffffffff, value, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    T largest = of_warp[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) largest = max(largest, of_warp[warp]);
    return largest;
}

// One block per row of classes.
template <typename T> __global__ void softmax_loss(
    const T* scores, const long long* targets, const bool* counted, T part, T* gradient, T* losses, long long classes
) {
    const long long row = blockIdx.x, target = targets[row];
    scores += row * classes;
    gradient += row * classes;
    T largest = scores[0], sum = 0;
    for (long long i = threadIdx.x; i < classes; i += blockDim.x) largest = max(largest, scores[i]);
    largest = block_max(largest);
    for (long long i = threadIdx.x; i < classes; i += blockDim.x) sum += exp(scores[i] - largest);
    sum = block_sum(sum);
    const T counts = counted && !counted[row] ? 0 : 1, factor = counts * part / sum;
    for (long long i = threadIdx.x; i < classes; i += blockDim.x)
        gradient[i] = exp(scores[i] - largest) * factor - (i == target ? counts * part : 0);
    if (threadIdx.x == 0) losses[row] = counts * (log(sum) - (scores[target] - largest));
}

// A warp per query: the row of g is multiplied by the query's number, and its product with the row of o is summed.
template <typename T> __global__ void output_gradients(
    const T* g, const T* o, const T* inverse, T* d, T* delta,
    long long heads, long long queries, long long rows, long long size,
    long long g0, long long g1, long long g2, long long o0, long long o1, long long o2
) {
    const long long row = 8LL * blockIdx.x + threadIdx.y;
    if (row >= rows) return;
    const long long sample = row / (heads * queries), head = row / queries % heads, query = row % queries;
    g += sample * g0 + head * g1 + query * g2;
    o += sample * o0 + head * o1 + query * o2;
    T sum = 0;
    for (long long i = threadIdx.x; i < size; i += 32) {
        const T value = g[i] * inverse[row];
        d[row * size + i] = value;
        sum += value * o[i];
    }
    for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    if (threadIdx.x == 0) delta[row] = sum;
}

// Block (head, 32 queries): 8 threads per query pass over the keys, and neighbours read neighbouring queries.
template <typename T> __global__ void causal_exponentials(T* scores, T* inverse, long long keys, long long queries) {
    __shared__ T part[8][33];
    const long long query = 32 * blockIdx.y + threadIdx.x;
    const long long seen = query < queries ? keys - queries + query + 1 : 0;
    T* column = scores + blockIdx.x * keys * queries + query;

    // [1] The largest score of the query: each thread's own, then that of the 8.
    T largest = seen ? column[0] : 0;
    for (long long key = threadIdx.y; key < seen; key += 8) largest = max(largest, column[key * queries]);
    part[threadIdx.y][threadIdx.x] = largest;
    __syncthreads();
    for (int i = 0; i < 8; ++i) largest = max(largest, part[i][threadIdx.x]);
    __syncthreads();

    // [2] The exponentials, 0 for keys that the query does not see, and their sum.
    T total = 0;
    for (long long key = threadIdx.y; query < queries && key < keys; key += 8) {
        const T value = key < seen ? exp(column[key * queries] - largest) : 0;
        column[key * queries] = value;
        total += value;
    }
    part[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && query < queries) {
        for (int i = 1; i < 8; ++i) total += part[i][threadIdx.x];
        inverse[blockIdx.x * queries + query] = 1 / total;
    }
}

// One block per row of n elements.
template <typename T> __global__ void layer_norm(
    const T* x, const T* weight, const T* bias, T* y, T* normal, T* inverse, long long n, T eps
) {
    const long long row = blockIdx.x * n;
    T sum = 0, squares = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += x[row + i];
    const T mean = block_sum(sum) / n;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) squares += (x[row + i] - mean) * (x[row + i] - mean);
    const T factor = 1 / sqrt(block_sum(squares) / n + eps);
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        const T value = (x[row + i] - mean) * factor;
        normal[row + i] = value;
        y[row + i] = value * weight[i] + bias[i];
    }
    if (threadIdx.x == 0) inverse[blockIdx.x] = factor;
}

template <typename T> __global__ void layer_norm_gradient(
    const T* g, const T* weight, const T* normal, const T* inverse, T* dx, long long n
) {
    const long long row = blockIdx.x * n;
    T sum = 0, along = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        sum += g[row + i] * weight[i];
        along += g[row + i] * weight[i] * normal[row + i];
    }
    sum = block_sum(sum) / n;
    along = block_sum(along) / n;
    for (long long i = threadIdx.x; i < n; i += blockDim.x)
        dx[row + i] = (g[row + i] * weight[i] - sum - normal[row + i] * along) * inverse[blockIdx.x];
}
