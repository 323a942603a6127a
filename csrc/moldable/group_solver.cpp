#include "moldable/group_solver.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace knapformer {
namespace {

constexpr double kOver = 1.0 + 1e-9;                // a level may be exceeded by rounding
constexpr double kNoSharedHeads = 0.5;              // the rounding that makes every share a whole head
constexpr double kGain = 1e-6;                      // smallest relative gain for which a variant is preferred to an earlier one
constexpr size_t kManyCells = 16384;                // split sequences × ranks from which one way to share is enough
constexpr double kOverfullNode = 0.01;              // a sequence may exceed the room of its node by this before it crosses nodes
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
  share(best.split, best.heads);
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
  constexpr HeadRule kHeadRules[] = {{kNoSharedHeads, false}, {0.2, false}, {0.03, false}, {0.2, true}, {0.03, true}};
  for (SplitRule split : {SplitRule::kOverAllRanks, SplitRule::kInTurn, SplitRule::kByNode, SplitRule::kInTurnByNode}) {
    if (split != SplitRule::kOverAllRanks && split_.size() < 2) break;
    if (is_by_node(split) && num_nodes() < 2) break;
    for (const HeadRule& heads : kHeadRules) {
      share(split, heads);
      const double cost = cost_s();
      if (cost < best.cost_s * (1.0 - kGain)) best = {fill, split, heads, cost};
      if (split_.empty() || split_.size() * num_ranks_ > kManyCells) return;
    }
  }
}

// Whether the caps hold the group's tokens.
bool GroupSolver::set_levels(const Group& group, const std::vector<Item>& fillers) {
  num_ranks_ = group.ranks.size();
  rank_ = group.ranks;
  node_.clear();
  node_begin_.clear();
  speed_.clear();
  cap_.clear();
  int32_t last = -1, nodes = 0;
  double speed = 0.0, tokens = 0.0, attention = 0.0, room = 0.0;
  for (int32_t r : rank_) {
    if (p_.node_index[r] != last) {
      last = p_.node_index[r];
      ++nodes;
      node_begin_.push_back(node_.size());
    }
    node_.push_back(nodes - 1);
    speed_.push_back(p_.speeds[r]);
    cap_.push_back(static_cast<double>(p_.max_tokens[r]));
    speed += p_.speeds[r];
    room += cap_.back();
  }
  node_begin_.push_back(num_ranks_);
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

void GroupSolver::share(SplitRule rule, const HeadRule& heads) {
  const size_t cells = split_.size() * num_ranks_;
  steps_ += cells * static_cast<size_t>(p_.num_heads);
  whole_heads_.assign(cells, 0);
  shared_rows_.assign(cells, 0);
  first_row_.assign(cells, 0);
  touched_heads_.assign(cells, 0.0);
  tokens_.assign(cells, 0);
  if (split_.empty()) return;
  share_attention(rule, heads);
  share_tokens(rule);
}

// What rounding to heads adds to a rank, the next sequence takes off.
void GroupSolver::share_attention(SplitRule rule, const HeadRule& heads) {
  double rest = 0.0;
  for (int32_t s : split_) rest += p_.attention_s[s];
  attention_so_far_ = filler_attention_;
  const std::vector<double> no_cap(num_ranks_, std::numeric_limits<double>::infinity());
  sharing_order_.resize(split_.size());
  std::iota(sharing_order_.begin(), sharing_order_.end(), size_t{0});
  if (is_by_node(rule)) {
    water_fill(rest, attention_so_far_, speed_, no_cap, attention_share_);
    choose_nodes();
  }
  if (rule == SplitRule::kInTurnByNode) {
    std::stable_partition(sharing_order_.begin(), sharing_order_.end(), [&](size_t k) { return crosses_nodes(k); });
  }
  for (size_t k : sharing_order_) {
    if (is_by_node(rule)) {
      choose_heads_by_node(k, rule);
    } else {
      water_fill(rest, attention_so_far_, speed_, no_cap, attention_share_);
      choose_heads(k, rule, rest);
    }
    cut_heads(k, heads);
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

// How much attention of each split sequence each node takes. A node has as much room as water filling over all ranks gives it. Each
// sequence, heaviest attention first, goes to the node that has the most room left. What fits into no node is cut over the nodes
// with the most room.
void GroupSolver::choose_nodes() {
  const size_t nodes = num_nodes();
  std::vector<double> room(nodes, 0.0);
  for (size_t i = 0; i < num_ranks_; ++i) room[node_[i]] += attention_share_[i];
  node_attention_s_.assign(split_.size() * nodes, 0.0);
  std::vector<size_t> by_attention(split_.size()), crossing;
  std::iota(by_attention.begin(), by_attention.end(), size_t{0});
  std::stable_sort(by_attention.begin(), by_attention.end(),
                   [&](size_t a, size_t b) { return p_.attention_s[split_[a]] > p_.attention_s[split_[b]]; });
  const auto roomiest = [&] { return static_cast<size_t>(std::max_element(room.begin(), room.end()) - room.begin()); };
  for (size_t k : by_attention) {
    const double own = p_.attention_s[split_[k]];
    const size_t n = roomiest();
    if (own > room[n] * (1.0 + kOverfullNode)) {
      crossing.push_back(k);
      continue;
    }
    node_attention_s_[k * nodes + n] = own;
    room[n] = std::max(0.0, room[n] - own);
  }
  for (size_t k : crossing) {
    double left = p_.attention_s[split_[k]];
    while (left > 0.0) {
      const size_t n = roomiest();
      const double take = room[n] > 0.0 ? std::min(left, room[n]) : left;
      node_attention_s_[k * nodes + n] += take;
      room[n] = std::max(0.0, room[n] - take);
      left -= take;
    }
  }
  node_rest_s_.assign(nodes, 0.0);
  for (size_t k = 0; k < split_.size(); ++k) {
    for (size_t n = 0; n < nodes; ++n) node_rest_s_[n] += node_attention_s_[k * nodes + n];
  }
}

bool GroupSolver::crosses_nodes(size_t k) const {
  const double* here = &node_attention_s_[k * num_nodes()];
  return std::count_if(here, here + num_nodes(), [](double s) { return s > 0.0; }) != 1;
}

// As `choose_heads`, inside each node.
void GroupSolver::choose_heads_by_node(size_t k, SplitRule rule) {
  const double own = p_.attention_s[split_[k]];
  if (own <= 0.0) {
    choose_heads(k, SplitRule::kOverAllRanks, 0.0);
    return;
  }
  const bool in_turn = rule == SplitRule::kInTurnByNode && !crosses_nodes(k);
  wanted_heads_.assign(num_ranks_, 0.0);
  for (size_t n = 0; n < num_nodes(); ++n) {
    const double here = node_attention_s_[k * num_nodes() + n];
    if (here <= 0.0) continue;
    const auto from = static_cast<std::ptrdiff_t>(node_begin_[n]), to = static_cast<std::ptrdiff_t>(node_begin_[n + 1]);
    const std::vector<double> load(attention_so_far_.begin() + from, attention_so_far_.begin() + to);
    const std::vector<double> speed(speed_.begin() + from, speed_.begin() + to);
    const std::vector<double> no_cap(load.size(), std::numeric_limits<double>::infinity());
    const double rest = std::max(here, node_rest_s_[n]);
    water_fill(rest, load, speed, no_cap, attention_share_);
    double left = here;
    for (size_t i = 0; i < load.size(); ++i) {
      const double seconds = in_turn ? std::min(attention_share_[i], left) : attention_share_[i] * here / rest;
      left -= seconds;
      wanted_heads_[node_begin_[n] + i] = seconds / own * p_.num_heads;
    }
    node_rest_s_[n] -= here;
  }
}

// A remainder that is nearer than the rule's rounding to a whole head is rounded. The heads that then are left over are shared by
// rows. Where no rank wants a whole head, the rounding is a share of the largest remainder instead of a head.
void GroupSolver::cut_heads(size_t k, const HeadRule& rule) {
  const bool may_share = rule.rounding < kNoSharedHeads;
  const double rounding = rule.rounding * std::min(1.0, *std::max_element(wanted_heads_.begin(), wanted_heads_.end()));
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
    for (size_t i = 0; i < num_ranks_; ++i) touched_heads_[cell(k, i)] = heads[i];
    const auto num_sharing = std::count_if(wanted_heads_.begin(), wanted_heads_.end(), [](double w) { return w > 0.0; });
    if (rule.one_head_each && num_sharing >= left) {
      lay_rows_by_head(k, left);
    } else {
      lay_rows_end_to_end(k, left, rounding);
    }
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
void GroupSolver::lay_rows_end_to_end(size_t k, int64_t shared_heads, double rounding) {
  const int64_t length = p_.lengths[split_[k]], rows = length * shared_heads;
  double wanted = 0.0, passed = 0.0;
  for (double w : wanted_heads_) wanted += w;
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

// Each rank's rows come from one of the last `shared_heads` heads, and each head's rows are cut in proportion to `wanted_heads_`. The
// largest wish goes first, to the head that is wanted least so far. Inside a head the ranks take rows in their order, in which
// the tokens lie too, so that many rows are computed in the node that holds their tokens.
void GroupSolver::lay_rows_by_head(size_t k, int64_t shared_heads) {
  const int64_t length = p_.lengths[split_[k]];
  order_.clear();
  for (size_t i = 0; i < num_ranks_; ++i) {
    if (wanted_heads_[i] > 0.0) order_.push_back(i);
  }
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return wanted_heads_[a] > wanted_heads_[b]; });
  std::vector<double> wanted(static_cast<size_t>(shared_heads), 0.0);
  std::vector<size_t> head_of(num_ranks_);
  for (size_t i : order_) {
    head_of[i] = static_cast<size_t>(std::min_element(wanted.begin(), wanted.end()) - wanted.begin());
    wanted[head_of[i]] += wanted_heads_[i];
  }
  std::sort(order_.begin(), order_.end());
  std::vector<double> passed(wanted.size(), 0.0);
  std::vector<int64_t> from(wanted.size(), 0);
  for (size_t i : order_) {
    const size_t h = head_of[i], c = cell(k, i);
    passed[h] += wanted_heads_[i];
    const auto to = std::min(length, static_cast<int64_t>(std::llround(static_cast<double>(length) * (passed[h] / wanted[h]))));
    shared_rows_[c] = to - from[h];
    first_row_[c] = static_cast<int64_t>(h) * length + from[h];
    if (to > from[h]) touched_heads_[c] += 1.0;
    from[h] = to;
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
  if (is_by_node(rule)) {
    share_tokens_by_node(rule, left);
    return;
  }
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

// Tokens go to the nodes in the proportion of the sequence's attention. First come sequences that cross nodes, as far as they leave room
// for those of one node; these come next. What then is left of the first goes where there is room. `left`: what each rank still takes.
void GroupSolver::share_tokens_by_node(SplitRule rule, std::vector<int64_t>& left) {
  const size_t nodes = num_nodes();
  std::vector<int64_t> room(nodes, 0), reserved(nodes, 0), rest(split_.size());
  for (size_t i = 0; i < num_ranks_; ++i) room[node_[i]] += left[i];
  for (size_t k = 0; k < split_.size(); ++k) {
    rest[k] = p_.lengths[split_[k]];
    for (size_t n = 0; n < nodes && !crosses_nodes(k); ++n) {
      if (node_attention_s_[k * nodes + n] > 0.0) reserved[n] += rest[k];
    }
  }
  const auto take = [&](size_t k, size_t n, int64_t tokens, bool in_turn) {
    tokens = std::max<int64_t>(0, std::min({tokens, room[n], rest[k]}));
    take_tokens(k, n, tokens, in_turn ? 1.0 : static_cast<double>(tokens) / static_cast<double>(std::max<int64_t>(1, room[n])), left);
    room[n] -= tokens;
    rest[k] -= tokens;
  };
  for (bool crossing : {true, false}) {
    for (size_t k = 0; k < split_.size(); ++k) {
      const double own = p_.attention_s[split_[k]];
      for (size_t n = 0; n < nodes && own > 0.0 && crosses_nodes(k) == crossing; ++n) {
        const double part = node_attention_s_[k * nodes + n] / own;
        const auto tokens = static_cast<int64_t>(static_cast<double>(p_.lengths[split_[k]]) * part);
        take(k, n, crossing ? std::min(tokens, room[n] - reserved[n]) : tokens, rule == SplitRule::kInTurnByNode && !crossing);
      }
    }
  }
  for (bool only_where_attention_is : {true, false}) {
    for (size_t k = 0; k < split_.size(); ++k) {
      for (size_t n = 0; n < nodes; ++n) {
        if (node_attention_s_[k * nodes + n] > 0.0 || !only_where_attention_is) take(k, n, rest[k], false);
      }
    }
  }
}

// `tokens` of the k-th split sequence to ranks of node n, to each the part of what it still takes, and rounding to the first.
void GroupSolver::take_tokens(size_t k, size_t n, int64_t tokens, double part, std::vector<int64_t>& left) {
  for (bool rounding : {false, true}) {
    for (size_t i = node_begin_[n]; i < node_begin_[n + 1] && tokens > 0; ++i) {
      const auto wanted = rounding ? left[i] : static_cast<int64_t>(static_cast<double>(left[i]) * part);
      const int64_t own = std::min({wanted, left[i], tokens});
      tokens_[cell(k, i)] += own;
      left[i] -= own;
      tokens -= own;
    }
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
