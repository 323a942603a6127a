#include "moldable/group_solver.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace knapformer {
namespace {

constexpr double kOver = 1.0 + 1e-9;                // a level may be exceeded by rounding
constexpr double kNoSharedHeads = 0.5;              // the rounding that makes every share a whole head
constexpr double kRoundings[] = {kNoSharedHeads, 0.2, 0.03};
constexpr double kGain = 1e-6;                      // smallest relative gain for which a variant is preferred to an earlier one
constexpr size_t kManyCells = 16384;                // split sequences × ranks from which one way to share is enough
constexpr size_t kMatchedRanks = 64;                // in larger groups shared rows are not matched with nodes

}  // namespace

double GroupSolver::makespan(const Group& group, const std::vector<Item>& fillers) {
  if (group.ranks.size() == 1) {
    double work = 0.0;
    for (int32_t s : group.anchors) work += p_.work_s[s];
    for (const auto& item : fillers) work += item.work_s;
    return work / p_.speeds[group.ranks[0]];
  }
  return best_variant(group, fillers).cost_s;
}

void GroupSolver::place(const Group& group, const std::vector<Item>& fillers, std::vector<Placement>& placements) {
  const Variant best = best_variant(group, fillers);
  place_fillers(group, fillers, best.fill);
  share(best.split, best.rounding);
  emit(fillers, placements);
}

GroupSolver::Variant GroupSolver::best_variant(const Group& group, const std::vector<Item>& fillers) {
  Variant best;
  if (!set_levels(group, fillers)) return best;
  place_fillers(group, fillers, FillRule::kSplitAboveLevels);
  const bool has_split_filler = split_.size() > group.anchors.size();
  try_split_rules(FillRule::kSplitAboveLevels, best);
  if (has_split_filler) {
    place_fillers(group, fillers, FillRule::kNeverSplit);
    try_split_rules(FillRule::kNeverSplit, best);
  }
  if (num_ranks_ == 2) {
    place_fillers(group, fillers, FillRule::kFirstUnderLevels);
    try_split_rules(FillRule::kFirstUnderLevels, best);
  }
  return best;
}

void GroupSolver::try_split_rules(FillRule fill, Variant& best) {
  for (SplitRule split : {SplitRule::kOverAllRanks, SplitRule::kInTurn}) {
    if (split == SplitRule::kInTurn && split_.size() < 2) break;
    for (double rounding : kRoundings) {
      share(split, rounding);
      const double cost = cost_s();
      if (cost < best.cost_s * (1.0 - kGain)) best = {fill, split, rounding, cost};
      if (split_.empty() || split_.size() * num_ranks_ > kManyCells) return;
    }
  }
}

// Whether the caps hold the group's tokens.
bool GroupSolver::set_levels(const Group& group, const std::vector<Item>& fillers) {
  num_ranks_ = group.ranks.size();
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
  for (auto* sums : {&node_tokens_, &node_touched_, &node_heads_}) sums->resize(static_cast<size_t>(nodes));
  return tokens <= room;
}

void GroupSolver::place_fillers(const Group& group, const std::vector<Item>& fillers, FillRule rule) {
  filler_tokens_.assign(num_ranks_, 0.0);
  filler_attention_.assign(num_ranks_, 0.0);
  split_ = group.anchors;
  filler_rank_.assign(fillers.size(), -1);
  steps_ += fillers.size() * num_ranks_;
  for (size_t k = 0; k < fillers.size(); ++k) {
    const auto linear = static_cast<double>(fillers[k].tokens);
    const double attention = p_.attention_s[fillers[k].id];
    double height = 0.0;
    const int32_t i = best_rank(fillers[k], linear, attention, rule, &height);
    if (i < 0 || (rule != FillRule::kNeverSplit && height > kOver)) {
      split_.push_back(fillers[k].id);
      continue;
    }
    filler_rank_[k] = i;
    filler_tokens_[i] += linear;
    filler_attention_[i] += attention;
  }
}

// The rank that has token room for the item and where the fuller phase, over its level, ends lowest. -1 where no rank has room.
// `height` is where it ends.
int32_t GroupSolver::best_rank(const Item& item, double linear, double attention, FillRule rule, double* height) const {
  int32_t best = -1;
  const double linear_scale = linear_level_ > 0 ? 1.0 / linear_level_ : 0.0;
  const double attention_scale = attention_level_ > 0 ? 1.0 / attention_level_ : 0.0;
  for (size_t i = 0; i < num_ranks_; ++i) {
    if (filler_tokens_[i] + static_cast<double>(item.tokens) > cap_[i]) continue;
    const double by_linear = (filler_tokens_[i] + linear) * linear_scale;
    const double by_attention = (filler_attention_[i] + attention) * attention_scale;
    const double here = std::max(by_linear, by_attention) / speed_[i];
    if (best >= 0 && here >= *height) continue;
    best = static_cast<int32_t>(i);
    *height = here;
    if (rule == FillRule::kFirstUnderLevels && here <= kOver) break;
  }
  return best;
}

void GroupSolver::share(SplitRule rule, double rounding) {
  const size_t cells = split_.size() * num_ranks_;
  steps_ += cells * static_cast<size_t>(p_.num_heads);
  whole_heads_.assign(cells, 0);
  shared_rows_.assign(cells, 0);
  first_row_.assign(cells, 0);
  touched_heads_.assign(cells, 0.0);
  tokens_.assign(cells, 0);
  if (split_.empty()) return;
  share_attention(rule, rounding);
  share_tokens(rule);
}

// What rounding to heads adds to a rank, the next sequence takes off.
void GroupSolver::share_attention(SplitRule rule, double rounding) {
  double rest = 0.0;
  for (int32_t s : split_) rest += p_.attention_s[s];
  attention_so_far_ = filler_attention_;
  const std::vector<double> no_cap(num_ranks_, std::numeric_limits<double>::infinity());
  for (size_t k = 0; k < split_.size(); ++k) {
    water_fill(rest, attention_so_far_, speed_, no_cap, attention_share_);
    choose_heads(k, rule, rest);
    cut_heads(k, rounding);
    const double per_head = attention_s_per_head(k);
    const double per_row = per_head / static_cast<double>(p_.lengths[split_[k]]);
    for (size_t i = 0; i < num_ranks_; ++i) {
      const double rows = static_cast<double>(shared_rows_[cell(k, i)]) * per_row;
      attention_so_far_[i] += whole_heads_[cell(k, i)] * per_head + rows;
    }
    rest -= p_.attention_s[split_[k]];
    rest = std::max(rest, 0.0);
  }
}

// The heads of the k-th split sequence that each rank should take, not yet rounded. `rest_s` is the attention of this sequence and
// of those after it.
void GroupSolver::choose_heads(size_t k, SplitRule rule, double rest_s) {
  const double own = p_.attention_s[split_[k]];
  wanted_heads_.assign(num_ranks_, 0.0);
  if (own <= 0.0 || rest_s <= 0.0) {  // attention that costs nothing follows the ranks' speed
    double speed = 0.0;
    for (double v : speed_) speed += v;
    for (size_t i = 0; i < num_ranks_; ++i) wanted_heads_[i] = p_.num_heads * speed_[i] / speed;
    return;
  }
  double left = own;
  for (size_t i = 0; i < num_ranks_; ++i) {
    const bool in_turn = rule == SplitRule::kInTurn;
    const double seconds = in_turn ? std::min(attention_share_[i], left) : attention_share_[i] * own / rest_s;
    left -= seconds;
    wanted_heads_[i] = seconds / own * p_.num_heads;
  }
}

// A remainder that is nearer than `rounding` to a whole head is rounded. The heads that then are left over are shared by rows.
void GroupSolver::cut_heads(size_t k, double rounding) {
  const bool may_share = rounding < kNoSharedHeads;
  int32_t* heads = &whole_heads_[cell(k, 0)];
  int64_t left = p_.num_heads;
  bool has_remainder = false;
  for (size_t i = 0; i < num_ranks_; ++i) {
    heads[i] = static_cast<int32_t>(std::floor(wanted_heads_[i] + (may_share ? rounding : 0.0)));
    left -= heads[i];
    has_remainder = has_remainder || wanted_heads_[i] - heads[i] > rounding;
  }
  if (may_share && left > 0 && has_remainder) {
    for (size_t i = 0; i < num_ranks_; ++i) {
      wanted_heads_[i] = wanted_heads_[i] - heads[i] > rounding ? wanted_heads_[i] - heads[i] : 0.0;
    }
    share_head_rows(k, left, rounding);
    return;
  }
  add_heads(heads, left);
  take_heads(heads, -left);
  for (size_t i = 0; i < num_ranks_; ++i) touched_heads_[cell(k, i)] = heads[i];
}

// `left` heads more, to the ranks that want them most.
void GroupSolver::add_heads(int32_t* heads, int64_t left) {
  while (left > 0) {
    order_.resize(num_ranks_);
    std::iota(order_.begin(), order_.end(), size_t{0});
    const auto wants_more = [&](size_t a, size_t b) { return wanted_heads_[a] - heads[a] > wanted_heads_[b] - heads[b]; };
    std::stable_sort(order_.begin(), order_.end(), wants_more);
    for (size_t k = 0; k < num_ranks_ && left > 0; ++k, --left) ++heads[order_[k]];
  }
}

// `too_many` heads fewer, from the ranks that want them least.
void GroupSolver::take_heads(int32_t* heads, int64_t too_many) {
  for (; too_many > 0; --too_many) {
    size_t best = num_ranks_;
    for (size_t i = 0; i < num_ranks_; ++i) {
      const bool is_better = best == num_ranks_ || heads[i] - wanted_heads_[i] > heads[best] - wanted_heads_[best];
      if (heads[i] > 0 && is_better) best = i;
    }
    --heads[best];
  }
}

// The rows of the last `shared_heads` heads, laid end to end and cut among the ranks in proportion to `wanted_heads_`. A cut that
// is nearer than `rounding` heads to the end of a head moves there.
void GroupSolver::share_head_rows(size_t k, int64_t shared_heads, double rounding) {
  const int64_t length = p_.lengths[split_[k]], rows = length * shared_heads;
  double wanted = 0.0, passed = 0.0;
  for (double w : wanted_heads_) wanted += w;
  for (size_t i = 0; i < num_ranks_; ++i) touched_heads_[cell(k, i)] = whole_heads_[cell(k, i)];
  int64_t from = 0;
  for (size_t i : order_of_rows(wanted, shared_heads)) {
    const size_t c = cell(k, i);
    passed += wanted_heads_[i];
    double end = static_cast<double>(shared_heads) * (passed / wanted);
    if (std::abs(end - std::round(end)) < rounding) end = std::round(end);
    const auto to = std::min(rows, static_cast<int64_t>(std::llround(static_cast<double>(length) * end)));
    shared_rows_[c] = to - from;
    first_row_[c] = from;
    if (to > from) touched_heads_[c] += static_cast<double>((to + length - 1) / length - from / length);
    from = to;
  }
}

// The order in which ranks take shared rows. Next is always a rank of the node that holds the tokens in the middle of the rows that
// it would take; where none is left, the first rank that is left.
std::vector<size_t> GroupSolver::order_of_rows(double wanted, int64_t shared_heads) const {
  std::vector<size_t> order;
  if (num_ranks_ > kMatchedRanks) {
    for (size_t i = 0; i < num_ranks_; ++i) {
      if (wanted_heads_[i] > 0.0) order.push_back(i);
    }
    return order;
  }
  std::vector<char> used(num_ranks_, 0);
  double at = 0.0;
  for (;;) {
    size_t next = num_ranks_;
    for (size_t i = 0; i < num_ranks_; ++i) {
      if (used[i] || wanted_heads_[i] <= 0.0) continue;
      if (next == num_ranks_) next = i;
      const double middle = at + 0.5 * wanted_heads_[i] / wanted * static_cast<double>(shared_heads);
      // The sequence's tokens lie over the ranks in order, about evenly.
      const double row = (middle - std::floor(middle)) * static_cast<double>(num_ranks_);
      if (node_[std::min(num_ranks_ - 1, static_cast<size_t>(row))] == node_[i]) {
        next = i;
        break;
      }
    }
    if (next == num_ranks_) return order;
    used[next] = 1;
    order.push_back(next);
    at += wanted_heads_[next] / wanted * static_cast<double>(shared_heads);
  }
}

void GroupSolver::share_tokens(SplitRule rule) {
  int64_t total = 0;
  for (int32_t s : split_) total += p_.lengths[s];
  std::vector<double> room(num_ranks_), share;
  for (size_t i = 0; i < num_ranks_; ++i) room[i] = cap_[i] - filler_tokens_[i];
  water_fill(static_cast<double>(total), filler_tokens_, speed_, room, share);
  std::vector<int64_t> left = round_to_sum(share, room, total);  // tokens that each rank still takes
  for (size_t k = 0; k < split_.size(); ++k) {
    const int64_t length = p_.lengths[split_[k]];
    int64_t rest = length;
    if (rule == SplitRule::kOverAllRanks && total > 0) {
      const double part = static_cast<double>(length) / static_cast<double>(total);
      for (size_t i = 0; i < num_ranks_; ++i) {
        const auto take = static_cast<int64_t>(static_cast<double>(left[i]) * part);
        tokens_[cell(k, i)] = std::min({take, left[i], rest});
        rest -= tokens_[cell(k, i)];
      }
    }
    for (size_t i = 0; i < num_ranks_; ++i) {
      const int64_t more = std::min(left[i] - tokens_[cell(k, i)], rest);
      tokens_[cell(k, i)] += more;
      rest -= more;
      left[i] -= tokens_[cell(k, i)];
    }
    total -= length;
  }
}

void GroupSolver::emit(const std::vector<Item>& fillers, std::vector<Placement>& placements) const {
  for (size_t k = 0; k < fillers.size(); ++k) {
    if (filler_rank_[k] < 0) continue;
    placements[fillers[k].id] = whole_on(p_, fillers[k].id, rank_[filler_rank_[k]]);
  }
  for (size_t k = 0; k < split_.size(); ++k) {
    auto& placement = placements[split_[k]];
    placement = {};
    int64_t at = 0;
    for (size_t i = 0; i < num_ranks_; ++i) {
      const int64_t tokens = tokens_[cell(k, i)];
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
  for (size_t i = 0; i < num_ranks_; ++i) {
    const int32_t heads = whole_heads_[cell(k, i)];
    if (heads > 0) placement.tiles.push_back({rank_[i], head, head + heads, 0, length});
    head += heads;
  }
  for (size_t i = 0; i < num_ranks_; ++i) {
    int64_t at = first_row_[cell(k, i)], rows = shared_rows_[cell(k, i)];
    while (rows > 0) {
      const auto shared_head = head + static_cast<int32_t>(at / length);
      const int64_t from = at % length, take = std::min(rows, length - from);
      placement.tiles.push_back({rank_[i], shared_head, shared_head + 1, from, from + take});
      at += take;
      rows -= take;
    }
  }
}

}  // namespace knapformer
