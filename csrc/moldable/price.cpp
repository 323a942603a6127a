// What a group's placement costs, as evaluate() will price the plan.
#include <algorithm>

#include "moldable/group.hpp"

namespace knapformer {

// Step 5.
double GroupSolver::price() {
  near_.assign(g_, Flow{});
  far_.assign(g_, Flow{});
  load_ = attention_;
  need_ = tokens_;
  for (size_t k = 0; k < split_.size(); ++k) {
    price_flows(k);
    const double per_head = p_.attention_s[split_[k]] / p_.num_heads;
    const double per_row = per_head / static_cast<double>(std::max<int64_t>(1, p_.lengths[split_[k]]));
    for (size_t i = 0; i < g_; ++i) {
      load_[i] += per_head * heads_[k * g_ + i] + per_row * static_cast<double>(piece_[k * g_ + i]);
      need_[i] += static_cast<double>(held_[k * g_ + i]);
    }
  }
  double worst = 0.0;
  for (size_t i = 0; i < g_; ++i) {
    load_[i] /= speed_[i];
    need_[i] *= p_.linear_s_per_token / speed_[i];
    worst = std::max(worst, load_[i] + need_[i]);
  }
  for (size_t k = 0; k < split_.size(); ++k) {
    double linear = 0.0, attention = 0.0, exchange = 0.0;
    size_t members = 0;
    for (size_t i = 0; i < g_; ++i) {
      if (held_[k * g_ + i] == 0 && kv_[k * g_ + i] == 0.0) continue;
      ++members;
      linear = std::max(linear, need_[i]);
      attention = std::max(attention, load_[i]);
      exchange = std::max(exchange, communication(i));
    }
    if (members > 1) worst = std::max(worst, linear + attention + exchange);
  }
  return worst;
}

// k and v of all tiles, q and output of whole heads: products of tokens and heads, summed by node.
void GroupSolver::price_flows(size_t k) {
  if (p_.lengths[split_[k]] <= 0) return;
  double tokens = 0, kv = 0, heads = 0;
  bool pieces = false;
  for (auto* sums : {&node_tokens_, &node_kv_, &node_heads_}) std::fill(sums->begin(), sums->end(), 0.0);
  for (size_t i = 0; i < g_; ++i) {
    const size_t c = k * g_ + i;
    node_tokens_[node_[i]] += static_cast<double>(held_[c]);
    node_kv_[node_[i]] += kv_[c];
    node_heads_[node_[i]] += heads_[c];
    tokens += static_cast<double>(held_[c]);
    kv += kv_[c];
    heads += heads_[c];
    pieces = pieces || piece_[c] > 0;
  }
  const auto add = [&](Flow& flow, size_t c, double other_tokens, double other_kv, double other_heads) {
    const auto own = static_cast<double>(held_[c]);
    flow.before_out += own * (2.0 * other_kv + other_heads);
    flow.before_in += other_tokens * (2.0 * kv_[c] + heads_[c]);
    flow.after_in += own * other_heads;
    flow.after_out += other_tokens * heads_[c];
  };
  for (size_t i = 0; i < g_; ++i) {
    const size_t c = k * g_ + i;
    const int32_t n = node_[i];
    add(near_[i], c, node_tokens_[n] - static_cast<double>(held_[c]), node_kv_[n] - kv_[c], node_heads_[n] - heads_[c]);
    if (node_tokens_.size() > 1) add(far_[i], c, tokens - node_tokens_[n], kv - node_kv_[n], heads - node_heads_[n]);
  }
  if (pieces) price_pieces(k);
}

// q and output of pieces of heads: the overlap of each with each rank's tokens.
void GroupSolver::price_pieces(size_t k) {
  const int64_t length = p_.lengths[split_[k]];
  segment_end_.resize(g_);
  int64_t end = 0;
  for (size_t i = 0; i < g_; ++i) segment_end_[i] = end += held_[k * g_ + i];
  for (size_t i = 0; i < g_; ++i) {
    int64_t at = piece_start_[k * g_ + i];
    const int64_t stop = at + piece_[k * g_ + i];
    auto owner = std::upper_bound(segment_end_.begin(), segment_end_.end(), at % length) - segment_end_.begin();
    for (; at < stop; owner = (owner + 1) % static_cast<std::ptrdiff_t>(g_)) {
      const int64_t rows = std::min(stop - at, segment_end_[owner] - at % length);
      if (rows <= 0 || held_[k * g_ + owner] == 0) continue;
      at += rows;
      if (static_cast<size_t>(owner) == i) continue;
      const auto moved = static_cast<double>(rows);
      auto& flow = node_[owner] == node_[i] ? near_ : far_;
      flow[owner].before_out += moved;
      flow[i].before_in += moved;
      flow[i].after_out += moved;
      flow[owner].after_in += moved;
    }
  }
}

double GroupSolver::communication(size_t i) const {
  const auto longer = [](const Flow& f) { return std::max(f.before_out, f.before_in) + std::max(f.after_out, f.after_in); };
  return p_.communication_scale * p_.bytes_per_head_token *
         (longer(near_[i]) / p_.intra_bytes_per_s + longer(far_[i]) / p_.inter_bytes_per_s);
}

}  // namespace knapformer
