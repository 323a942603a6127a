// What a group's placement costs, as evaluate() will price the plan.
#include <algorithm>

#include "moldable/group_solver.hpp"

namespace knapformer {

double GroupSolver::cost_s() {
  near_.assign(num_ranks_, Flow{});
  far_.assign(num_ranks_, Flow{});
  row_pairs_.clear();
  add_phases();
  for (size_t k = 0; k < split_.size(); ++k) add_flows(k);
  if (p_.latency_s > 0.0) count_peers();
  double worst = 0.0;
  for (size_t i = 0; i < num_ranks_; ++i) worst = std::max(worst, attention_s_[i] + linear_s_[i]);
  for (size_t k = 0; k < split_.size(); ++k) worst = std::max(worst, meeting_s(k));
  return worst;
}

// Each rank's linear phase and attention.
void GroupSolver::add_phases() {
  attention_s_ = filler_attention_;
  linear_s_ = filler_tokens_;
  for (size_t k = 0; k < split_.size(); ++k) {
    const double per_head = attention_s_per_head(k);
    const double per_row = per_head / static_cast<double>(std::max<int64_t>(1, p_.lengths[split_[k]]));
    for (size_t i = 0; i < num_ranks_; ++i) {
      attention_s_[i] += per_head * whole_heads_[cell(k, i)] + per_row * static_cast<double>(shared_rows_[cell(k, i)]);
      linear_s_[i] += static_cast<double>(tokens_[cell(k, i)]);
    }
  }
  for (size_t i = 0; i < num_ranks_; ++i) {
    attention_s_[i] /= speed_[i];
    linear_s_[i] *= p_.linear_s_per_token / speed_[i];
  }
}

// The meeting of the k-th split sequence's ranks: the largest of each phase. 0 where only one rank takes part.
double GroupSolver::meeting_s(size_t k) const {
  double linear = 0.0, attention = 0.0, communication = 0.0;
  size_t members = 0;
  for (size_t i = 0; i < num_ranks_; ++i) {
    if (tokens_[cell(k, i)] == 0 && touched_heads_[cell(k, i)] == 0.0) continue;
    ++members;
    linear = std::max(linear, linear_s_[i]);
    attention = std::max(attention, attention_s_[i]);
    communication = std::max(communication, communication_s(i));
  }
  return members > 1 ? linear + attention + communication : 0.0;
}

// k and v of all heads that a rank touches, q and output of its whole heads: products of tokens and heads, summed by node.
void GroupSolver::add_flows(size_t k) {
  if (p_.lengths[split_[k]] <= 0) return;
  double tokens = 0, touched = 0, heads = 0;
  bool has_shared_rows = false;
  for (auto* sums : {&node_tokens_, &node_touched_, &node_heads_}) std::fill(sums->begin(), sums->end(), 0.0);
  for (size_t i = 0; i < num_ranks_; ++i) {
    const size_t c = cell(k, i);
    node_tokens_[node_[i]] += static_cast<double>(tokens_[c]);
    node_touched_[node_[i]] += touched_heads_[c];
    node_heads_[node_[i]] += whole_heads_[c];
    tokens += static_cast<double>(tokens_[c]);
    touched += touched_heads_[c];
    heads += whole_heads_[c];
    has_shared_rows = has_shared_rows || shared_rows_[c] > 0;
  }
  const auto add = [&](Flow& flow, size_t c, double other_tokens, double other_touched, double other_heads) {
    const auto own = static_cast<double>(tokens_[c]);
    flow.before_out += own * (2.0 * other_touched + other_heads);
    flow.before_in += other_tokens * (2.0 * touched_heads_[c] + whole_heads_[c]);
    flow.after_in += own * other_heads;
    flow.after_out += other_tokens * whole_heads_[c];
  };
  for (size_t i = 0; i < num_ranks_; ++i) {
    const size_t c = cell(k, i);
    const int32_t n = node_[i];
    add(near_[i], c, node_tokens_[n] - static_cast<double>(tokens_[c]), node_touched_[n] - touched_heads_[c], node_heads_[n] - whole_heads_[c]);
    if (node_tokens_.size() > 1) add(far_[i], c, tokens - node_tokens_[n], touched - node_touched_[n], heads - node_heads_[n]);
  }
  if (has_shared_rows) add_row_flows(k);
}

// q and output of shared heads: the overlap of each rank's rows with each rank's tokens.
void GroupSolver::add_row_flows(size_t k) {
  const int64_t length = p_.lengths[split_[k]];
  segment_end_.resize(num_ranks_);
  int64_t end = 0;
  for (size_t i = 0; i < num_ranks_; ++i) segment_end_[i] = end += tokens_[cell(k, i)];
  for (size_t i = 0; i < num_ranks_; ++i) {
    int64_t at = first_row_[cell(k, i)];
    const int64_t stop = at + shared_rows_[cell(k, i)];
    auto owner = std::upper_bound(segment_end_.begin(), segment_end_.end(), at % length) - segment_end_.begin();
    for (; at < stop; owner = (owner + 1) % static_cast<std::ptrdiff_t>(num_ranks_)) {
      const int64_t rows = std::min(stop - at, segment_end_[owner] - at % length);
      if (rows <= 0 || tokens_[cell(k, owner)] == 0) continue;
      at += rows;
      if (static_cast<size_t>(owner) == i) continue;
      const auto moved = static_cast<double>(rows);
      if (p_.latency_s > 0.0) row_pairs_.emplace_back(owner, i);
      auto& flow = node_[owner] == node_[i] ? near_ : far_;
      flow[owner].before_out += moved;
      flow[i].before_in += moved;
      flow[i].after_out += moved;
      flow[owner].after_in += moved;
    }
  }
}

// Both exchanges of rank i: keys come from every rank with tokens; rows of q and of the output go where they overlap. A group has few
// ranks, so that pairs may be marked in a table.
void GroupSolver::count_peers() {
  const size_t g = num_ranks_;
  before_peers_.assign(g * g, 0);
  after_peers_.assign(g * g, 0);
  const auto mark = [g](std::vector<char>& pairs, size_t a, size_t b) { pairs[a * g + b] = pairs[b * g + a] = a != b; };
  for (size_t k = 0; k < split_.size(); ++k) {
    if (p_.lengths[split_[k]] <= 0) continue;
    for (size_t owner = 0; owner < g; ++owner) {
      if (tokens_[cell(k, owner)] == 0) continue;
      for (size_t i = 0; i < g; ++i) {
        if (touched_heads_[cell(k, i)] > 0) mark(before_peers_, owner, i);
        if (whole_heads_[cell(k, i)] > 0) mark(after_peers_, owner, i);
      }
    }
  }
  for (const auto& [owner, i] : row_pairs_) mark(after_peers_, owner, i);
  peers_.assign(g, 0.0);
  for (size_t i = 0; i < g; ++i) {
    for (size_t j = 0; j < g; ++j) peers_[i] += before_peers_[i * g + j] + after_peers_[i * g + j];
  }
}

double GroupSolver::communication_s(size_t i) const {
  const auto longer = [](const Flow& f) { return std::max(f.before_out, f.before_in) + std::max(f.after_out, f.after_in); };
  const double links_s =
      p_.bytes_per_head_token * (longer(near_[i]) / p_.intra_bytes_per_s + longer(far_[i]) / p_.inter_bytes_per_s);
  return p_.communication_scale * (p_.latency_s > 0.0 ? links_s + p_.latency_s * peers_[i] : links_s);
}

}  // namespace knapformer
