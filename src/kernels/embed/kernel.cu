// Token plus position embedding, low-rank deltas of the former, and virtual tokens.
#include "q8/codes.cuh"

/// x (n, c) = wte (vocab, c)[ids (n)] + wpe[positions (n)], with row ids[i] - vocab of `prompt` for ids from vocab on.
/// `token(id, at, sum)` reads elements of a row of wte.
template <class T, class Token>
__device__ __forceinline__ void embed_rows(const unsigned *ids, const unsigned *positions, const half_t *wpe,
                                           const float *prompt, T *x, int vocab, int c, Token token) {
  i64 row = blockIdx.x;
  unsigned id = ids[row];
  bool is_virtual = id >= unsigned(vocab);
  const half_t *position = wpe + i64(positions[row]) * c;
  if (is_virtual) prompt += i64(id - unsigned(vocab)) * c;
  for (int at = threadIdx.x * WIDE; at < c; at += blockDim.x * WIDE) {
    float sum[WIDE], other[WIDE];
    if (is_virtual) load(prompt + at, c - at, sum);
    else token(id, at, sum);
    load(position + at, c - at, other);
#pragma unroll
    for (int i = 0; i < WIDE; i++) sum[i] += other[i];
    store(sum, c - at, x + row * c + at);
  }
}

/// As `embed_rows`. Grid: n blocks.
template <class T>
__device__ void embed(const unsigned *ids, const unsigned *positions, const Weight<T> *wte, const half_t *wpe,
                      const float *prompt, T *x, int vocab, int c) {
  auto token = [=](unsigned id, int at, float(&sum)[WIDE]) { load(wte + i64(id) * c + at, c - at, sum); };
  embed_rows(ids, positions, wpe, prompt, x, vocab, c, token);
}
EXPORT(embed,
       (const unsigned *ids, const unsigned *positions, const Weight<T> *wte, const half_t *wpe, const float *prompt, T *x,
        int vocab, int c),
       (ids, positions, wte, wpe, prompt, x, vocab, c))

/// As `embed_rows`, with wte in 8-bit codes, whose rows beyond vocab are not read. Grid: n blocks.
template <class T>
__device__ void embed_q8(const unsigned *ids, const unsigned *positions, q8::Coded wte, const half_t *wpe,
                         const float *prompt, T *x, int vocab) {
  int c = wte.cols;
  auto token = [=](unsigned id, int at, float(&sum)[WIDE]) { q8::load(wte, id, at, c - at, sum); };
  embed_rows(ids, positions, wpe, prompt, x, vocab, c, token);
}
EXPORT(embed_q8,
       (const unsigned *ids, const unsigned *positions, q8::Coded wte, const half_t *wpe, const float *prompt, T *x,
        int vocab),
       (ids, positions, wte, wpe, prompt, x, vocab))

/// d_prompt (p, c)[id - vocab] += the sum of dx (n, c) over the tokens of an id from vocab on. by_id (n) has the tokens of
/// one id side by side; the block that has the first of them adds them all, in order. Grid: n blocks.
template <class T>
__device__ void prompt_backward(const unsigned *ids, const unsigned *by_id, const T *dx, float *d_prompt, int n, int c,
                                int vocab) {
  int first = blockIdx.x;
  unsigned id = ids[by_id[first]];
  if (id < unsigned(vocab) || (first > 0 && ids[by_id[first - 1]] == id)) return;
  float *to = d_prompt + i64(id - unsigned(vocab)) * c;
  for (int at = threadIdx.x * WIDE; at < c; at += blockDim.x * WIDE) {
    float sum[WIDE], d[WIDE];
    load(to + at, c - at, sum);
    for (int place = first; place < n && ids[by_id[place]] == id; place++) {
      load(dx + i64(by_id[place]) * c + at, c - at, d);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sum[i] += d[i];
    }
    store(sum, c - at, to + at);
  }
}
EXPORT(prompt_backward,
       (const unsigned *ids, const unsigned *by_id, const T *dx, float *d_prompt, int n, int c, int vocab),
       (ids, by_id, dx, d_prompt, n, c, vocab))

constexpr int TOKENS = 8, RANKS = 32;

/// Element r of column `id` of A (rank, vocab); 0 beyond either end.
__device__ __forceinline__ float column_of(const float *a, int r, unsigned id, int vocab, int rank) {
  return r < rank && id < unsigned(vocab) ? a[i64(r) * vocab + id] : 0.f;
}

/// x (n, c) += scale B (c, r) A (r, vocab)[:, id]; tokens without a column of A stay. A block takes 8 tokens and 128
/// channels. Grid: (ceil(n / 8), ceil(c / 128)) blocks of 128.
template <class T>
__device__ void embedding_add(const unsigned *ids, const float *a, const float *b, float scale, T *x, int n, int c,
                              int vocab, int rank) {
  SHARED(float[TOKENS][RANKS], xa);
  int token = blockIdx.x * TOKENS, channel = blockIdx.y * blockDim.x + threadIdx.x;
  float sum[TOKENS] = {};
  for (int first = 0; first < rank; first += RANKS) {
    __syncthreads(); // the step before is done with `xa`
    for (int at = threadIdx.x; at < TOKENS * RANKS; at += blockDim.x) {
      int row = token + at / RANKS;
      xa[at / RANKS][at % RANKS] = row < n ? column_of(a, first + at % RANKS, ids[row], vocab, rank) : 0.f;
    }
    __syncthreads();
    int count = channel < c ? min(RANKS, rank - first) : 0;
    for (int r = 0; r < count; r++) {
      float w = b[i64(channel) * rank + first + r];
#pragma unroll
      for (int i = 0; i < TOKENS; i++) sum[i] += xa[i][r] * w;
    }
  }
  if (channel >= c) return;
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    if (token + i >= n) return;
    T *to = x + i64(token + i) * c + channel;
    *to = narrow<T>(widen(*to) + scale * sum[i]);
  }
}
EXPORT(embedding_add,
       (const unsigned *ids, const float *a, const float *b, float scale, T *x, int n, int c, int vocab, int rank),
       (ids, a, b, scale, x, n, c, vocab, rank))

/// xa (n, r) = columns of A (r, vocab). Grid: ceil(n r / 256) blocks of 256.
extern "C" __global__ void embedding_xa(const unsigned *ids, const float *a, float *xa, int n, int vocab, int rank) {
  i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < i64(n) * rank) xa[at] = column_of(a, int(at % rank), ids[at / rank], vocab, rank);
}
LAUNCHER(embedding_xa)

/// db (c, r) += scale dx (n, c)^T xa (n, r). A block takes 32 channels and 8 ranks; each of its 8 warps sums every
/// eighth token, and their sums are added in order. Grid: (ceil(c / 32), ceil(r / 8)) blocks of 256.
template <class T>
__device__ void embedding_db(const T *dx, const float *xa, float scale, float *db, int n, int c, int rank) {
  SHARED(float[8][32][WIDE], parts);
  int channel = blockIdx.x * 32 + lane(), first = blockIdx.y * WIDE;
  float sum[WIDE] = {}, v[WIDE];
  if (channel < c) {
    for (int token = warp(); token < n; token += 8) {
      float d = widen(dx[i64(token) * c + channel]);
      load(xa + i64(token) * rank + first, rank - first, v);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sum[i] += d * v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < WIDE; i++) parts[warp()][lane()][i] = sum[i];
  __syncthreads();
  int place = threadIdx.x / WIDE, r = first + threadIdx.x % WIDE;
  channel = blockIdx.x * 32 + place;
  if (channel >= c || r >= rank) return;
  float total = 0;
#pragma unroll
  for (int part = 0; part < 8; part++) total += parts[part][place][threadIdx.x % WIDE];
  db[i64(channel) * rank + r] += scale * total;
}
EXPORT(embedding_db, (const T *dx, const float *xa, float scale, float *db, int n, int c, int rank),
       (dx, xa, scale, db, n, c, rank))

/// d_xa (n, r) = scale dx (n, c) B (c, r). Grid: ceil(n / 8) blocks of 256, a warp a token.
template <class T>
__device__ void embedding_d_xa(const T *dx, const float *b, float scale, float *d_xa, int n, int c, int rank) {
  int token = blockIdx.x * 8 + warp();
  if (token >= n) return;
  for (int first = 0; first < rank; first += WIDE) {
    float sum[WIDE] = {}, w[WIDE];
    for (int channel = lane(); channel < c; channel += 32) {
      float d = widen(dx[i64(token) * c + channel]);
      load(b + i64(channel) * rank + first, rank - first, w);
#pragma unroll
      for (int i = 0; i < WIDE; i++) sum[i] += d * w[i];
    }
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
      float total = warp_sum(sum[i]);
      if (lane() == 0 && first + i < rank) d_xa[i64(token) * rank + first + i] = scale * total;
    }
  }
}
EXPORT(embedding_d_xa, (const T *dx, const float *b, float scale, float *d_xa, int n, int c, int rank),
       (dx, b, scale, d_xa, n, c, rank))

/// da (r, vocab)[:, id] += the sum of d_xa (n, r) over the tokens of that id. by_id (n) has the tokens of one id side by
/// side; the warp that has the first of them adds them all. Grid: ceil(n / 8) blocks of 256.
extern "C" __global__ void embedding_da(const unsigned *ids, const unsigned *by_id, const float *d_xa, float *da, int n,
                                        int vocab, int rank) {
  int first = blockIdx.x * 8 + warp();
  if (first >= n) return;
  unsigned id = ids[by_id[first]];
  if (id >= unsigned(vocab) || (first > 0 && ids[by_id[first - 1]] == id)) return;
  int end = first + 1;
  while (end < n && ids[by_id[end]] == id) end++;
  for (int r = 0; r < rank; r++) {
    float sum = 0;
    for (int at = first + lane(); at < end; at += 32) sum += d_xa[i64(by_id[at]) * rank + r];
    sum = warp_sum(sum);
    if (lane() == 0) da[i64(r) * vocab + id] += sum;
  }
}
LAUNCHER(embedding_da)
