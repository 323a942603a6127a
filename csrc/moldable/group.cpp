#include "moldable/group.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace knapformer {
namespace {

constexpr double kOver = 1.0 + 1e-9;  // a level may be exceeded by rounding
constexpr double kSnaps[] = {0.5, 0.2, 0.03};
constexpr size_t kManyCells = 16384;   // split sequences × ranks from which one way to share is enough
constexpr size_t kMatchedRanks = 64;   // in larger groups pooled rows are not matched with nodes

}  // namespace

double GroupSolver::makespan(const Group& group, const std::vector<Item>& fillers) {
  if (group.ranks.size() == 1) {
    double work = 0.0;
    for (int32_t s : group.anchors) work += p_.work_s[s];
    for (const auto& item : fillers) work += item.work_s;
    return work / p_.speeds[group.ranks[0]];
  }
  return best_variant(group, fillers).cost;
}

void GroupSolver::place(const Group& group, const std::vector<Item>& fillers, std::vector<Placement>& placements) {
  const Variant best = best_variant(group, fillers);
  fill(group, fillers, best.fill);
  share(best.together, best.snap);
  emit(fillers, placements);
}

GroupSolver::Variant GroupSolver::best_variant(const Group& group, const std::vector<Item>& fillers) {
  Variant best;
  if (!open(group, fillers)) return best;
  fill(group, fillers, Fill::kLevel);
  const size_t level_splits = split_.size();
  try_shares(Fill::kLevel, best);
  if (level_splits > group.anchors.size()) {
    fill(group, fillers, Fill::kLoose);
    try_shares(Fill::kLoose, best);
  }
  if (g_ == 2) {
    fill(group, fillers, Fill::kPiled);
    try_shares(Fill::kPiled, best);
  }
  return best;
}

void GroupSolver::try_shares(Fill fill, Variant& best) {
  for (bool together : {true, false}) {
    if (!together && split_.size() < 2) break;
    for (double snap : kSnaps) {
      share(together, snap);
      const double cost = price();
      if (cost < best.cost * (1.0 - 1e-6)) best = {fill, together, snap, cost};
      if (split_.empty() || split_.size() * g_ > kManyCells) return;
    }
  }
}

// Step 1. Whether the caps hold the group's tokens.
bool GroupSolver::open(const Group& group, const std::vector<Item>& fillers) {
  g_ = group.ranks.size();
  rank_ = group.ranks;
  node_.clear();
  speed_.clear();
  cap_.clear();
  int32_t last = -1, nodes = 0;
  double speed = 0.0, tokens = 0.0, attention = 0.0, room = 0.0;
  for (int32_t r : rank_) {
    if (p_.node_index[r] != last) {
      last = p_.node_index[r];
      ++nodes;
    }
    node_.push_back(nodes - 1);
    speed_.push_back(p_.speeds[r]);
    cap_.push_back(static_cast<double>(p_.max_tokens[r]));
    speed += p_.speeds[r];
    room += cap_.back();
  }
  const auto add = [&](int32_t s) {
    tokens += static_cast<double>(p_.lengths[s]);
    attention += p_.attention_s[s];
  };
  for (int32_t s : group.anchors) add(s);
  for (const auto& item : fillers) add(item.id);
  linear_level_ = tokens / speed;
  attention_level_ = attention / speed;
  for (auto* sums : {&node_tokens_, &node_kv_, &node_heads_}) sums->resize(static_cast<size_t>(nodes));
  return tokens <= room;
}

// Step 2.
void GroupSolver::fill(const Group& group, const std::vector<Item>& fillers, Fill how) {
  tokens_.assign(g_, 0.0);
  attention_.assign(g_, 0.0);
  split_ = group.anchors;
  whole_rank_.assign(fillers.size(), -1);
  work_ += fillers.size() * g_;
  for (size_t k = 0; k < fillers.size(); ++k) {
    const auto linear = static_cast<double>(fillers[k].tokens);
    const double attention = p_.attention_s[fillers[k].id];
    double height = 0.0;
    const int32_t i = best_rank(fillers[k], linear, attention, how, &height);
    if (i < 0 || (how != Fill::kLoose && height > kOver)) {
      split_.push_back(fillers[k].id);
      continue;
    }
    whole_rank_[k] = i;
    tokens_[i] += linear;
    attention_[i] += attention;
  }
}

// The rank that has token room for the item and ends lowest (piled: the first that stays under the levels), or -1.
int32_t GroupSolver::best_rank(const Item& item, double linear, double attention, Fill how, double* height) const {
  int32_t best = -1;
  const double linear_scale = linear_level_ > 0 ? 1.0 / linear_level_ : 0.0;
  const double attention_scale = attention_level_ > 0 ? 1.0 / attention_level_ : 0.0;
  for (size_t i = 0; i < g_; ++i) {
    if (tokens_[i] + static_cast<double>(item.tokens) > cap_[i]) continue;
    const double by_linear = (tokens_[i] + linear) * linear_scale;
    const double by_attention = (attention_[i] + attention) * attention_scale;
    const double here = std::max(by_linear, by_attention) / speed_[i];
    if (best >= 0 && here >= *height) continue;
    best = static_cast<int32_t>(i);
    *height = here;
    if (how == Fill::kPiled && here <= kOver) break;
  }
  return best;
}

void GroupSolver::share(bool together, double snap) {
  const size_t cells = split_.size() * g_;
  work_ += cells * static_cast<size_t>(p_.num_heads);
  heads_.assign(cells, 0);
  piece_.assign(cells, 0);
  piece_start_.assign(cells, 0);
  kv_.assign(cells, 0.0);
  held_.assign(cells, 0);
  if (split_.empty()) return;
  share_attention(together, snap);
  share_tokens(together);
}

// Steps 3 and 4 for attention. What rounding adds to a rank, the next sequence takes off.
void GroupSolver::share_attention(bool together, double snap) {
  double rest = 0.0;
  for (int32_t s : split_) rest += p_.attention_s[s];
  load_ = attention_;
  const std::vector<double> no_cap(g_, std::numeric_limits<double>::infinity());
  for (size_t k = 0; k < split_.size(); ++k) {
    water_fill(rest, load_, speed_, no_cap, need_);
    want_attention(k, together, rest);
    cut_heads(k, snap);
    const double per_head = p_.attention_s[split_[k]] / p_.num_heads;
    const double per_row = per_head / static_cast<double>(p_.lengths[split_[k]]);
    for (size_t i = 0; i < g_; ++i) load_[i] += heads_[k * g_ + i] * per_head + static_cast<double>(piece_[k * g_ + i]) * per_row;
    rest -= p_.attention_s[split_[k]];
    rest = std::max(rest, 0.0);
  }
}

// The heads, not yet whole, that each rank should take of the k-th split sequence.
void GroupSolver::want_attention(size_t k, bool together, double rest) {
  const double own = p_.attention_s[split_[k]];
  want_.assign(g_, 0.0);
  if (own <= 0.0 || rest <= 0.0) {  // attention that costs nothing follows the ranks' speed
    double speed = 0.0;
    for (double v : speed_) speed += v;
    for (size_t i = 0; i < g_; ++i) want_[i] = p_.num_heads * speed_[i] / speed;
    return;
  }
  double left = own;
  for (size_t i = 0; i < g_; ++i) {
    const double seconds = together ? need_[i] * own / rest : std::min(need_[i], left);
    left -= seconds;
    want_[i] = seconds / own * p_.num_heads;
  }
}

// Step 4. `snap`: a remainder this near to a whole head is rounded; 0.5 rounds all of them.
void GroupSolver::cut_heads(size_t k, double snap) {
  int32_t* heads = &heads_[k * g_];
  int64_t left = p_.num_heads;
  bool open = false;
  for (size_t i = 0; i < g_; ++i) {
    heads[i] = static_cast<int32_t>(std::floor(want_[i] + snap * (snap < 0.5 ? 1.0 : 0.0)));
    left -= heads[i];
    open = open || want_[i] - heads[i] > snap;
  }
  if (snap < 0.5 && left > 0 && open) {
    for (size_t i = 0; i < g_; ++i) want_[i] = want_[i] - heads[i] > snap ? want_[i] - heads[i] : 0.0;
    pool_rows(k, left, snap);
    return;
  }
  add_heads(heads, left);
  for (; left < 0; ++left) {
    size_t best = g_;
    for (size_t i = 0; i < g_; ++i) {
      if (heads[i] > 0 && (best == g_ || heads[i] - want_[i] > heads[best] - want_[best])) best = i;
    }
    --heads[best];
  }
  for (size_t i = 0; i < g_; ++i) kv_[k * g_ + i] = heads[i];
}

// Heads that are left over, to the ranks that want them most.
void GroupSolver::add_heads(int32_t* heads, int64_t left) {
  while (left > 0) {
    order_.resize(g_);
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return want_[a] - heads[a] > want_[b] - heads[b]; });
    for (size_t k = 0; k < g_ && left > 0; ++k, --left) ++heads[order_[k]];
  }
}

// The rows of the last `pool_heads` heads, one head after another, cut among the ranks in proportion to `want_`. A cut this near
// to the end of a head moves there.
void GroupSolver::pool_rows(size_t k, int64_t pool_heads, double snap) {
  const int64_t length = p_.lengths[split_[k]], rows = length * pool_heads;
  double sum = 0.0, passed = 0.0;
  for (double w : want_) sum += w;
  for (size_t i = 0; i < g_; ++i) kv_[k * g_ + i] = heads_[k * g_ + i];
  int64_t from = 0;
  for (size_t i : pool_order(sum, pool_heads)) {
    const size_t cell = k * g_ + i;
    passed += want_[i];
    double end = static_cast<double>(pool_heads) * (passed / sum);
    if (std::abs(end - std::round(end)) < snap) end = std::round(end);
    const auto to = std::min(rows, static_cast<int64_t>(std::llround(static_cast<double>(length) * end)));
    piece_[cell] = to - from;
    piece_start_[cell] = from;
    if (to > from) kv_[cell] += static_cast<double>((to + length - 1) / length - from / length);
    from = to;
  }
}

// The order in which ranks take pooled rows: next always one of the node that holds the tokens in the middle of its rows, if
// there is one left.
std::vector<size_t> GroupSolver::pool_order(double sum, int64_t pool_heads) const {
  std::vector<size_t> order;
  if (g_ > kMatchedRanks) {
    for (size_t i = 0; i < g_; ++i) {
      if (want_[i] > 0.0) order.push_back(i);
    }
    return order;
  }
  std::vector<char> used(g_, 0);
  double at = 0.0;
  for (;;) {
    size_t next = g_;
    for (size_t i = 0; i < g_; ++i) {
      if (used[i] || want_[i] <= 0.0) continue;
      if (next == g_) next = i;
      const double middle = at + 0.5 * want_[i] / sum * static_cast<double>(pool_heads);
      // tokens lie over the ranks in order, about evenly
      const double row = (middle - std::floor(middle)) * static_cast<double>(g_);
      if (node_[std::min(g_ - 1, static_cast<size_t>(row))] == node_[i]) {
        next = i;
        break;
      }
    }
    if (next == g_) return order;
    used[next] = 1;
    order.push_back(next);
    at += want_[next] / sum * static_cast<double>(pool_heads);
  }
}

// Step 3 for tokens.
void GroupSolver::share_tokens(bool together) {
  int64_t total = 0;
  for (int32_t s : split_) total += p_.lengths[s];
  std::vector<double> room(g_);
  for (size_t i = 0; i < g_; ++i) room[i] = cap_[i] - tokens_[i];
  water_fill(static_cast<double>(total), tokens_, speed_, room, budget_);
  std::vector<int64_t> left = round_to_sum(budget_, room, total);
  for (size_t k = 0; k < split_.size(); ++k) {
    const int64_t length = p_.lengths[split_[k]];
    int64_t rest = length;
    if (together && total > 0) {
      for (size_t i = 0; i < g_; ++i) {
        const auto take = static_cast<int64_t>(static_cast<double>(left[i]) * (static_cast<double>(length) / static_cast<double>(total)));
        held_[k * g_ + i] = std::min({take, left[i], rest});
        rest -= held_[k * g_ + i];
      }
    }
    for (size_t i = 0; i < g_; ++i) {
      const int64_t more = std::min(left[i] - held_[k * g_ + i], rest);
      held_[k * g_ + i] += more;
      rest -= more;
      left[i] -= held_[k * g_ + i];
    }
    total -= length;
  }
}

void GroupSolver::emit(const std::vector<Item>& fillers, std::vector<Placement>& placements) const {
  for (size_t k = 0; k < fillers.size(); ++k) {
    if (whole_rank_[k] < 0) continue;
    placements[fillers[k].id] = whole_on(p_, fillers[k].id, rank_[whole_rank_[k]]);
  }
  for (size_t k = 0; k < split_.size(); ++k) {
    auto& placement = placements[split_[k]];
    placement = {};
    int64_t at = 0;
    for (size_t i = 0; i < g_; ++i) {
      const int64_t tokens = held_[k * g_ + i];
      if (tokens > 0) placement.segments.push_back({rank_[i], at, at + tokens});
      at += tokens;
    }
    emit_tiles(k, placement);
  }
}

void GroupSolver::emit_tiles(size_t k, Placement& placement) const {
  const int64_t length = p_.lengths[split_[k]];
  if (length == 0) return;
  int32_t head = 0;
  for (size_t i = 0; i < g_; ++i) {
    const int32_t heads = heads_[k * g_ + i];
    if (heads > 0) placement.tiles.push_back({rank_[i], head, head + heads, 0, length});
    head += heads;
  }
  for (size_t i = 0; i < g_; ++i) {
    int64_t at = piece_start_[k * g_ + i], rows = piece_[k * g_ + i];
    while (rows > 0) {
      const auto pool = head + static_cast<int32_t>(at / length);
      const int64_t from = at % length, take = std::min(rows, length - from);
      placement.tiles.push_back({rank_[i], pool, pool + 1, from, from + take});
      at += take;
      rows -= take;
    }
  }
}

}  // namespace knapformer
