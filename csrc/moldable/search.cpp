// Packing. The fillers are packed into the groups of each layout of good estimate (candidates.hpp), heaviest first to the group of
//    the lowest level, and then moved and swapped while that lowers the highest level. Then each group is solved. What a group
//    takes beyond its work is its overhead, and the fillers are packed once more with it.
// Improving. The best groupings are improved by moves and swaps between the slowest group and fast ones. Each is confirmed by
//    solving both groups. Where none helps, the slowest group merges with a fast one.
// The grouping of the lowest makespan wins.
#include "moldable/search.hpp"

#include <algorithm>
#include <cmath>

#include "bounds.hpp"

namespace knapformer {
namespace {

constexpr double kSmallStep = 1500.0;  // sequences and ranks up to which no try is left out
constexpr size_t kBudget = 3'000'000, kBudgetPerRank = 20'000;  // steps of the group solver after which nothing more is tried
constexpr int32_t kManyRanks = 64;
constexpr int kRounds = 2;
constexpr size_t kPackedLayouts = 12;
constexpr size_t kPackedLayoutsOfContainers = 5;
constexpr size_t kPackedLayoutsOfFreeSmall = 3;
constexpr size_t kImproved = 6;
constexpr size_t kBreadth = 12;
constexpr size_t kMergeBreadth = 12;
constexpr int kRefineSteps = 400;
constexpr int kImproveSteps = 300;
constexpr double kGain = 1e-7;
constexpr double kNearEnough = 1.02;   // over the tight bound: then a large step tries no groups of several anchors
constexpr double kFarOff = 1.06;       // over the best makespan so far: such a grouping is not packed a second time
constexpr double kLevelEnough = 1e-4;  // over the mean level: level enough before the groups are solved

}  // namespace

double Grouping::makespan_s() const {
  double highest = 0.0;
  for (const auto& bin : bins) highest = std::max(highest, bin.level());
  return highest;
}

Search::Search(const Problem& problem)
    : p_(problem),
      solver_(problem),
      budget_((kBudget + kBudgetPerRank * static_cast<size_t>(problem.num_ranks)) * at_effort(1, 10, 200) / 10),
      tight_s_(tight_bound_s(problem)),
      share_of_tries_(std::min(1.0, kSmallStep / std::max<double>(1.0, problem.num_sequences() + problem.num_ranks))),
      candidates_(problem, share_of_tries_) {}

size_t Search::at_effort(size_t fast, size_t by_default, size_t thorough) const {
  if (p_.effort == Effort::kFast) return fast;
  return p_.effort == Effort::kThorough ? thorough : by_default;
}

bool Search::is_large() const { return share_of_tries_ < 1.0 || p_.num_ranks > kManyRanks; }

Grouping Search::run() {
  const auto tries = [this](size_t full, size_t least) {
    return std::max(least, static_cast<size_t>(share_of_tries_ * static_cast<double>(full)));
  };
  std::vector<std::pair<double, Grouping>> packed;
  std::vector<std::vector<Group>> tried;
  double best_packed = std::numeric_limits<double>::infinity();
  const auto pack_layouts = [&](int32_t container, bool free_small, size_t most) {
    auto candidates = candidates_.of(container, free_small);
    candidates.resize(std::min(candidates.size(), tries(most * at_effort(1, 3, 12) / 3, 3)));
    for (const auto& candidate : candidates) {
      if (!packed.empty() && (is_budget_spent() || (!candidate.is_packed && candidate.estimate_s >= best_packed))) continue;
      if (std::any_of(tried.begin(), tried.end(), [&](const auto& groups) { return same_groups(groups, candidate.groups); })) continue;
      tried.push_back(candidate.groups);
      Grouping grouping = pack_groups(candidate, best_packed);
      const double makespan = grouping.makespan_s();
      best_packed = std::min(best_packed, makespan);
      packed.push_back({makespan, std::move(grouping)});
    }
  };
  for (int32_t container : candidates_.containers()) {
    if (container > 1 && p_.effort == Effort::kFast) break;
    if (container > 1 && is_large() && best_packed <= kNearEnough * tight_s_) break;
    pack_layouts(container, false, container == 1 ? kPackedLayouts : kPackedLayoutsOfContainers);
    if (container > 1 && best_packed > kNearEnough * tight_s_) pack_layouts(container, true, kPackedLayoutsOfFreeSmall);
  }
  std::stable_sort(packed.begin(), packed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  packed.resize(std::min(packed.size(), tries(kImproved * at_effort(1, 3, 12) / 3, 2)));
  size_t best = 0;
  for (size_t k = 0; k < packed.size(); ++k) {
    improve(packed[k].second, kImproveSteps);
    packed[k].first = packed[k].second.makespan_s();
    if (packed[k].first < packed[best].first) best = k;
  }
  return std::move(packed[best].second);
}

std::vector<Placement> Search::place(const Grouping& grouping) {
  std::vector<Placement> placements(p_.lengths.size());
  for (size_t k = 0; k < grouping.groups.size(); ++k) {
    const auto& group = grouping.groups[k];
    if (group.ranks.size() > 1) {
      solver_.place(group, grouping.bins[k].items, placements);
      continue;
    }
    const auto put = [&](int32_t s) { placements[s] = whole_on(p_, s, group.ranks[0]); };
    for (int32_t s : group.anchors) put(s);
    for (const auto& item : grouping.bins[k].items) put(item.id);
  }
  return placements;
}

// Packing.
Grouping Search::pack_groups(const Candidate& layout, double best_s) {
  Grouping best, now;
  now.groups = layout.groups;
  auto overhead = layout.overhead_s;
  double best_makespan = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    fill(now, overhead);
    const double makespan = now.makespan_s();
    if (makespan < best_makespan) {
      best_makespan = makespan;
      best = now;
    }
    if (now.groups.size() != overhead.size() || makespan > kFarOff * best_s || is_budget_spent()) break;
    for (size_t k = 0; k < now.groups.size(); ++k) {
      double work = anchor_work_s(p_, now.groups[k]);
      for (const auto& item : now.bins[k].items) work += item.work_s;
      overhead[k] = now.bins[k].load_s - work;
    }
  }
  return best;
}

void Search::fill(Grouping& grouping, const std::vector<double>& overhead_s) {
  grouping.bins = open_bins(p_, grouping.groups, overhead_s);
  const auto left = pack(grouping.bins, fillers_of(p_, grouping.groups));
  double load = 0.0, size = 0.0;
  for (const auto& bin : grouping.bins) {
    load += bin.load_s;
    size += bin.size;
  }
  refine(grouping.bins, kRefineSteps, kBreadth, load / size * (1.0 + kLevelEnough));
  make_room(grouping, left);
  for (size_t k = 0; k < grouping.groups.size(); ++k) solve(grouping, k);
}

// Some items may fit into no bin, and some bins may hold more than their caps. Then groups are merged with the one that has the
// most room until all fits. The caps together hold all tokens, so that this ends.
void Search::make_room(Grouping& grouping, const std::vector<Item>& left) {
  auto& bins = grouping.bins;
  const auto roomiest = [&](size_t except) {
    size_t best = bins.size();
    for (size_t k = 0; k < bins.size(); ++k) {
      if (k != except && (best == bins.size() || bins[k].room > bins[best].room)) best = k;
    }
    return best;
  };
  for (size_t k = 0; k < bins.size(); ++k) {
    while (bins[k].room < 0) {
      const size_t other = roomiest(k);
      merge(grouping, std::min(k, other), std::max(k, other));
      k = std::min(k, other);
    }
  }
  for (const auto& item : left) {
    size_t k = roomiest(bins.size());
    while (bins[k].room < item.tokens) {
      const size_t other = roomiest(k);
      merge(grouping, std::min(k, other), std::max(k, other));
      k = std::min(k, other);
    }
    bins[k].add(item);
  }
}

void Search::solve(Grouping& grouping, size_t k) {
  auto& bin = grouping.bins[k];
  bin.load_s = solver_.makespan(grouping.groups[k], bin.items) * bin.size;
}

void Search::merge(Grouping& grouping, size_t into, size_t from) const {
  auto& group = grouping.groups[into];
  const auto& other = grouping.groups[from];
  group.ranks.insert(group.ranks.end(), other.ranks.begin(), other.ranks.end());
  std::sort(group.ranks.begin(), group.ranks.end(), [&](int32_t a, int32_t b) {
    return p_.node_index[a] != p_.node_index[b] ? p_.node_index[a] < p_.node_index[b] : a < b;
  });
  group.anchors.insert(group.anchors.end(), other.anchors.begin(), other.anchors.end());
  std::sort(group.anchors.begin(), group.anchors.end(), [&](int32_t a, int32_t b) {
    return p_.work_s[a] != p_.work_s[b] ? p_.work_s[a] > p_.work_s[b] : a < b;
  });
  auto& bin = grouping.bins[into];
  const auto& more = grouping.bins[from];
  double items = 0.0;
  for (const auto& item : more.items) items += item.work_s;
  bin.size += more.size;
  bin.room += more.room;
  bin.load_s += more.load_s - items;
  for (const auto& item : more.items) {
    bin.room += item.tokens;
    bin.add(item);
  }
  grouping.groups.erase(grouping.groups.begin() + static_cast<std::ptrdiff_t>(from));
  grouping.bins.erase(grouping.bins.begin() + static_cast<std::ptrdiff_t>(from));
}

// Improving.
void Search::improve(Grouping& grouping, int steps) {
  Levels levels(grouping.bins);
  for (int step = 0; step < steps && !is_budget_spent(); ++step) {
    if (exchange_items(grouping, levels)) continue;
    if (!merge_groups(grouping, levels)) return;
    levels = Levels(grouping.bins);
  }
}

bool Search::exchange_items(Grouping& grouping, Levels& levels) {
  auto& bins = grouping.bins;
  const size_t worst = levels.highest();
  const double before = bins[worst].level() * (1.0 - kGain);
  std::vector<Change> changes;
  for (size_t to : levels.lowest(kBreadth * at_effort(1, 1, 4))) {
    const Change change = best_change(bins, worst, to, before);
    if (change.level < before) changes.push_back(change);
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.level < b.level; });
  for (const auto& change : changes) {
    if (is_budget_spent()) break;
    const Bin from = bins[worst], to = bins[change.to];
    apply(bins, worst, change);
    solve(grouping, worst);
    solve(grouping, change.to);
    if (std::max(bins[worst].level(), bins[change.to].level()) < before) {
      levels.update(bins, worst);
      levels.update(bins, change.to);
      return true;
    }
    bins[worst] = from;
    bins[change.to] = to;
  }
  return false;
}

bool Search::merge_groups(Grouping& grouping, const Levels& levels) {
  const size_t worst = levels.highest();
  const double before = grouping.bins[worst].level() * (1.0 - kGain);
  size_t best = grouping.bins.size();
  double best_level = before;
  for (size_t other : levels.lowest(kMergeBreadth * at_effort(1, 1, 4))) {
    if (is_budget_spent()) break;
    Grouping pair{{grouping.groups[worst], grouping.groups[other]}, {grouping.bins[worst], grouping.bins[other]}};
    merge(pair, 0, 1);
    solve(pair, 0);
    if (pair.bins[0].level() < best_level) {
      best_level = pair.bins[0].level();
      best = other;
    }
  }
  if (best == grouping.bins.size()) return false;
  const size_t into = std::min(worst, best);
  merge(grouping, into, std::max(worst, best));
  solve(grouping, into);
  return true;
}

}  // namespace knapformer
