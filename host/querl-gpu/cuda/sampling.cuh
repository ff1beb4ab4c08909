// Sampling of each row's next token: logits processors, temperature, top-k, top-p, draw. Launcher: src/device/sampling.rs.
//
// Departures from the CPU implementation (`sample_token` of querl-model):
// 1. Weights (unnormalised probabilities) are fixed-point numbers, e^((logit - max) / temperature) in units of 2^-40. Their sums do not
//    depend on the order of additions, unlike sums of floats. Weights below 2^-40 of the largest are 0.
// 2. top-k and top-p find the logit at the border of the kept tokens by radix selection, from the highest byte to the lowest, not by
//    sorting.
//
// A block of 1024 threads processes a row of V logits. Passes over the row: 3 for the distribution, 2 for logits processors, 5 for
// top-k, 6 for top-p, 1 for the draw; all but the first read from the L2 cache. Static shared memory: about 6 KiB; dynamic: V / 512
// words of 8 bytes. Floor: 4 V bytes per row.
#pragma once
#include "common.cuh"

constexpr unsigned NOT_FINITE = 0xffffffffu, NOTHING_LEFT = 0xfffffffeu;
constexpr int DRAW_BLOCK = 512, CLASSES = 512;
constexpr float STEPS = 1099511627776.0f; // 2^40

// Softmax of a row's logits at the temperature, in fixed-point weights (`share`).
struct Distribution {
    float max, inverse_temperature;
    u64 total; // sum of the weights

    __device__ __forceinline__ u64 share(float logit) const {
        return (u64)(expf((logit - max) * inverse_temperature) * STEPS);
    }
    __device__ __forceinline__ float logprob(float logit) const {
        return (logit - max) * inverse_temperature - (float)log((double)total / (double)STEPS);
    }
    // Class of a logit by its distance from the maximum, 16 classes per factor of e. First step of a filter: the classes spread the
    // tokens, so that threads rarely add to the same bin.
    __device__ __forceinline__ int class_of(float logit) const {
        const float distance = (max - logit) * inverse_temperature * 16.0f;
        return distance < (float)(CLASSES - 1) ? (int)distance : CLASSES - 1;
    }
};

// Radix key of a logit: a larger logit has a larger key; 0 and -0 have the same key.
__device__ __forceinline__ unsigned key_of(float logit) {
    const unsigned bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Tokens that top-k and top-p keep: those with a key above `key`, and those with this key up to token `last`.
struct Border {
    unsigned key;
    int last;

    __device__ __forceinline__ bool keeps(float logit, int token) const {
        const unsigned other = key_of(logit);
        return other > key || (other == key && token <= last);
    }
};

struct Bins {
    u64 sums[CLASSES];
    u64 before;   // sum of the bins before the chosen one
    int chosen;
    float memory[32];
    u64 words[32];
};

template <class F> __device__ __forceinline__ u64 block_total(int n, Bins& bins, F f) {
    u64 all = 0;
    for (int token = threadIdx.x; token < n; token += blockDim.x) all += f(token);
    return block_sum(all, bins.words);
}

// Inverse of a cumulative sum: the first index at which the sum of values 0 to index exceeds `left`, or the last index if none does.
// Subtracts from `left` the sum of the values before the index. Called by all lanes of a warp.
template <class Value> __device__ __forceinline__ int first_beyond(int size, u64& left, Value value) {
    const int lane = threadIdx.x % 32;
    for (int start = 0; start < size; start += 32) {
        const u64 own = start + lane < size ? value(start + lane) : 0;
        u64 upto = own;
        for (int by = 1; by < 32; by *= 2) {
            const u64 other = __shfl_up_sync(ALL_LANES, upto, by);
            if (lane >= by) upto += other;
        }
        const unsigned beyond = __ballot_sync(ALL_LANES, upto > left);
        if (beyond != 0) {
            const int first = __ffs((int)beyond) - 1;
            left -= __shfl_sync(ALL_LANES, upto - own, first);
            return start + first;
        }
        left -= __shfl_sync(ALL_LANES, upto, 31);
    }
    return size - 1;
}

// Histogram: adds `weight(token)` to bin `bin(token)` for every token whose bin is not negative. Stores in `bins.chosen` the first bin at
// which the sum of bins 0 to chosen reaches `wanted` (at least 1), and in `bins.before` the sum of the bins before it.
template <class Bin, class Weight>
__device__ __forceinline__ void choose_bin(int n, int n_bins, u64 wanted, Bins& bins, Bin bin, Weight weight) {
    for (int i = threadIdx.x; i < n_bins; i += blockDim.x) bins.sums[i] = 0;
    __syncthreads();
    for (int token = threadIdx.x; token < n; token += blockDim.x) {
        const int at = bin(token);
        if (at >= 0) atomicAdd(&bins.sums[at], weight(token)); // integers: the sum does not depend on the order
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u64 left = wanted - 1;
        const int chosen = first_beyond(n_bins, left, [&](int i) { return bins.sums[i]; });
        if (threadIdx.x == 0) bins.before = wanted - 1 - left, bins.chosen = chosen;
    }
    __syncthreads();
}

// Radix selection: the key at which the cumulative weight of tokens in descending order of logits reaches `wanted`. `bins.before` becomes
// the weight of all tokens with a larger key.
template <class Weight>
__device__ __forceinline__ unsigned border_key(const float* logits, int n, const Distribution& all, u64 wanted, Bins& bins, Weight weight) {
    choose_bin(n, CLASSES, wanted, bins, [&](int token) { return all.class_of(logits[token]); }, weight);
    const int edge = bins.chosen;
    u64 before = bins.before;
    __syncthreads();
    unsigned key = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        const unsigned above = shift == 24 ? 0u : 0xffffffffu << (shift + 8);
        auto bin = [&](int token) {
            const float logit = logits[token];
            if (all.class_of(logit) != edge) return -1;
            const unsigned other = key_of(logit);
            return (other & above) == (key & above) ? 255 - (int)(other >> shift & 255u) : -1;
        };
        choose_bin(n, 256, wanted - before, bins, bin, weight);
        key |= (unsigned)(255 - bins.chosen) << shift;
        before += bins.before;
        __syncthreads();
    }
    if (threadIdx.x == 0) bins.before = before;
    __syncthreads();
    return key;
}

// The `count`-th token (from 1) with this key; the last token of the vocabulary if there are fewer.
__device__ __forceinline__ int token_at(const float* logits, int n, unsigned key, i64 count) {
    i64 seen = 0;
    for (int start = 0; start < n; start += blockDim.x) {
        const int token = start + threadIdx.x;
        const int found = __syncthreads_count(token < n && key_of(logits[token]) == key);
        if (seen + found < count) {
            seen += found;
            continue;
        }
        __shared__ int place;
        if (threadIdx.x == 0) {
            int at = start;
            for (;; at++)
                if (key_of(logits[at]) == key && ++seen == count) break;
            place = at;
        }
        __syncthreads();
        return place;
    }
    return n - 1;
}

// Tokens that are left by top-k and then top-p. Sources: transformers' TopKLogitsWarper and TopPLogitsWarper.
__device__ __forceinline__ Border filtered(const float* logits, int n, const Distribution& all, i64 top_k, double top_p, Bins& bins) {
    Border border = {0, n - 1};
    if (top_k > 0 && top_k < n)
        border.key = border_key(logits, n, all, (u64)top_k, bins, [](int) { return (u64)1; });
    if (top_p >= 1.0) return border;
    auto share = [&](int token) { return border.keeps(logits[token], token) ? all.share(logits[token]) : (u64)0; };
    const u64 total = block_total(n, bins, share);
    const u64 wanted = min(max((u64)ceil(top_p * (double)total), (u64)1), total);
    const unsigned key = border_key(logits, n, all, wanted, bins, share);
    const u64 missing = wanted - bins.before;
    auto of_key = [&](int token) { return key_of(logits[token]) == key ? share(token) : (u64)0; };
    const u64 at_key = block_total(n, bins, of_key);
    const u64 n_at_key = block_total(n, bins, [&](int token) { return (u64)(key_of(logits[token]) == key); });
    const u64 each = n_at_key > 0 ? at_key / n_at_key : 0;
    const u64 count = each > 0 ? (missing + each - 1) / each : n_at_key;
    border.key = key;
    if (count < n_at_key) border.last = token_at(logits, n, key, (i64)(count > 0 ? count : 1));
    return border;
}

// Draws a token: the first token at which the sum of the weights of tokens 0 to token exceeds `target`. `sums`: scratch memory, one word
// per 512 tokens.
template <class Share> __device__ __forceinline__ int drawn(int n, u64 target, u64* sums, Share share) {
    __shared__ int found;
    const int lane = threadIdx.x % 32, n_blocks = (n + DRAW_BLOCK - 1) / DRAW_BLOCK;
    for (int block = threadIdx.x / 32; block < n_blocks; block += blockDim.x / 32) {
        u64 all = 0;
        for (int i = lane; i < DRAW_BLOCK; i += 32) {
            const int token = block * DRAW_BLOCK + i;
            if (token < n) all += share(token);
        }
        all = warp_sum(all);
        if (lane == 0) sums[block] = all;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u64 left = target;
        const int block = first_beyond(n_blocks, left, [&](int block) { return sums[block]; });
        const int size = min(DRAW_BLOCK, n - block * DRAW_BLOCK);
        const int token = first_beyond(size, left, [&](int i) { return share(block * DRAW_BLOCK + i); });
        if (lane == 0) found = block * DRAW_BLOCK + token;
    }
    __syncthreads();
    return found;
}

// Applies the logits processors that depend on the response so far (`answer`); returns false if no logit was changed. originals[i]: logit
// of the response's i-th token before. Sources: transformers' RepetitionPenaltyLogitsProcessor, NoRepeatNGramLogitsProcessor and
// MinNewTokensLengthLogitsProcessor, in this order.
__device__ __forceinline__ bool limit(float* logits, int n, const unsigned* answer, int length, float* originals, const unsigned* stops,
                                      int n_stops, float penalty, int ngram, bool continues) {
    for (int i = threadIdx.x; i < length; i += blockDim.x) originals[i] = answer[i] < n ? logits[answer[i]] : 0.0f;
    __syncthreads();
    const bool penalises = penalty != 1.0f && length > 0, bars = ngram > 0 && length >= ngram;
    if (penalises) {
        for (int i = threadIdx.x; i < length; i += blockDim.x) {
            bool is_first = answer[i] < n;
            for (int j = 0; j < i && is_first; j++) is_first = answer[j] != answer[i];
            if (is_first) logits[answer[i]] = originals[i] < 0.0f ? originals[i] * penalty : originals[i] / penalty;
        }
        __syncthreads();
    }
    if (bars) {
        const unsigned* begun = answer + length + 1 - ngram;
        for (int start = threadIdx.x; start + ngram <= length; start += blockDim.x) {
            bool is_same = answer[start + ngram - 1] < n;
            for (int i = 0; i + 1 < ngram && is_same; i++) is_same = answer[start + i] == begun[i];
            if (is_same) logits[answer[start + ngram - 1]] = -INFINITY;
        }
    }
    if (continues)
        for (int i = threadIdx.x; i < n_stops; i += blockDim.x)
            if (stops[i] < n) logits[stops[i]] = -INFINITY;
    __syncthreads();
    return penalises || bars || (continues && n_stops > 0);
}

// Maximum of the logits; -inf if all are.
__device__ __forceinline__ float largest(const float* logits, int n, Bins& bins) {
    float max = -INFINITY;
    for (int token = threadIdx.x; token < n; token += blockDim.x) max = fmaxf(max, logits[token]);
    return block_max(max, bins.memory);
}

// Index of the maximum; the first one if there are several.
__device__ __forceinline__ int argmax(const float* logits, int n, float max) {
    __shared__ int first;
    if (threadIdx.x == 0) first = n;
    __syncthreads();
    for (int token = threadIdx.x; token < n; token += blockDim.x)
        if (logits[token] == max) {
            atomicMin(&first, token);
            break;
        }
    __syncthreads();
    return first < n ? first : 0;
}

// logits: (rows, n); answers: tokens of the responses, (rows, max_tokens), or null if no logits processor reads them; originals: scratch
// memory like answers; lengths: number of tokens of each response, (rows). For the others see `Gpu::choose`.
extern "C" __global__ void __launch_bounds__(1024)
    choose(float* logits, int n, const unsigned* answers, const unsigned* lengths, int max_tokens, float* originals,
           const unsigned* stops, int n_stops, float temperature, double top_p, i64 top_k, float penalty, int ngram,
           i64 min_new_tokens, const double* uniforms, unsigned* tokens, float* logprobs, float* behaviour_logprobs) {
    __shared__ Bins bins;
    const i64 row = blockIdx.x;
    logits += row * n;
    if (answers) answers += row * max_tokens, originals += row * max_tokens;
    const i64 written = lengths[row];
    const int length = answers ? (int)min(written, (i64)max_tokens) : 0;

    Distribution whole = {largest(logits, n, bins), 1.0f / temperature, 0};
    int wrong = !isfinite(whole.max);
    for (int token = threadIdx.x; token < n; token += blockDim.x) wrong |= isnan(logits[token]);
    if (__syncthreads_or(wrong)) {
        if (threadIdx.x == 0) tokens[row] = NOT_FINITE, logprobs[row] = 0.0f, behaviour_logprobs[row] = 0.0f;
        return;
    }
    whole.total = block_total(n, bins, [&](int token) { return whole.share(logits[token]); });

    Distribution left = whole;
    if (limit(logits, n, answers, length, originals, stops, n_stops, penalty, ngram, written < min_new_tokens)) {
        left.max = largest(logits, n, bins);
        if (left.max == -INFINITY) {
            if (threadIdx.x == 0) tokens[row] = NOTHING_LEFT, logprobs[row] = 0.0f, behaviour_logprobs[row] = 0.0f;
            return;
        }
    }
    int token;
    float behaviour = 0.0f;
    if (uniforms) {
        const Border border = filtered(logits, n, left, top_k, top_p, bins);
        auto share = [&](int token) { return border.keeps(logits[token], token) ? left.share(logits[token]) : (u64)0; };
        left.total = block_total(n, bins, share);
        const u64 target = (u64)(uniforms[row] * (double)left.total);
        token = drawn(n, target < left.total ? target : left.total - 1, reinterpret_cast<u64*>(shared_memory), share);
        behaviour = left.logprob(logits[token]);
    } else {
        token = argmax(logits, n, left.max);
    }
    if (threadIdx.x != 0) return;
    float logit = logits[token];
    for (int i = 0; i < length; i++)
        if (answers[i] == (unsigned)token) logit = originals[i];
    tokens[row] = (unsigned)token;
    logprobs[row] = whole.logprob(logit);
    behaviour_logprobs[row] = behaviour;
}
