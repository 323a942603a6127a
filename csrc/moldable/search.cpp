// Numbered steps:
//   1. Layouts for several targets and scales (layout.hpp), each distinct one once.
//   2. Settle each: fillers to the lowest group, 1-D moves and swaps; solve the groups; what a group took beyond its work is
//      its overhead; again with those overheads.
//   3. Improve the most promising: moves and swaps between the slowest group and the fastest ones, confirmed by solving both;
//      where none helps, merge it with a fast one.
//   4. The lowest makespan wins.
#include "moldable/search.hpp"

#include <algorithm>
#include <numeric>

namespace knapformer {
namespace {

constexpr double kTargets[] = {1.0, 1.01, 1.03, 1.06, 1.12};  // over the expected makespan
constexpr double kScales[] = {1.0, 0.8, 0.6, 0.45};
constexpr double kShares[] = {0.98, 0.7};
constexpr int kRounds = 3;
constexpr size_t kImproved = 4;
constexpr size_t kBreadth = 12;
constexpr int kRefineSteps = 400;
constexpr double kGain = 1e-7;

bool same_layout(const std::vector<AnchorSize>& a, const std::vector<AnchorSize>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const AnchorSize& x, const AnchorSize& y) {
    return x.sequence == y.sequence && x.ranks == y.ranks;
  });
}

}  // namespace

Grouping Search::run() {
  std::vector<Candidate> candidates;
  for (auto& sizes : layouts()) {
    Grouping grouping = settle(lay_out(p_, sizes));
    const double makespan = grouping.makespan_s();
    candidates.push_back({std::move(sizes), std::move(grouping), makespan});
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.makespan_s < b.makespan_s; });
  candidates.resize(std::min(candidates.size(), kImproved));
  size_t best = 0;
  for (size_t k = 0; k < candidates.size(); ++k) {
    improve(candidates[k].grouping, 300);
    candidates[k].makespan_s = candidates[k].grouping.makespan_s();
    if (candidates[k].makespan_s < candidates[best].makespan_s) best = k;
  }
  return std::move(candidates[best].grouping);
}

std::vector<Placement> Search::place(const Grouping& grouping) {
  std::vector<Placement> placements(p_.lengths.size());
  for (size_t k = 0; k < grouping.groups.size(); ++k) {
    const auto& group = grouping.groups[k];
    if (group.ranks.size() > 1) {
      solver_.place(group, grouping.bins[k].items, placements);
      continue;
    }
    const auto put = [&](int32_t s) {
      placements[s] = {{{group.ranks[0], 0, p_.lengths[s]}}, {{group.ranks[0], 0, p_.num_heads, 0, p_.lengths[s]}}};
    };
    for (int32_t s : group.anchors) put(s);
    for (const auto& item : grouping.bins[k].items) put(item.id);
  }
  return placements;
}

// Step 1.
std::vector<std::vector<AnchorSize>> Search::layouts() const {
  const double expected = expected_makespan();
  std::vector<std::vector<AnchorSize>> found;
  for (double share : kShares) {
    for (double scale : kScales) {
      for (double target : kTargets) {
        auto sizes = size_anchors(p_, {target * expected, share, scale});
        const bool known = std::any_of(found.begin(), found.end(), [&](const auto& other) { return same_layout(sizes, other); });
        if (!known) found.push_back(std::move(sizes));
      }
    }
  }
  return found;
}

// Work plus the communication of the smallest groups that would meet it, over all ranks: a fixed point.
double Search::expected_makespan() const {
  const double base = p_.lower_bound_s();
  double expected = base;
  const double mean_speed = p_.total_speed / p_.num_ranks;
  for (int round = 0; round < 3; ++round) {
    double extra = 0.0;
    for (const auto& anchor : size_anchors(p_, {std::max(expected, base) * 1.005, 1.0, 1.0})) {
      extra += anchor.ranks * mean_speed * even_communication_s(p_, anchor.sequence, anchor.ranks, p_.num_ranks);
    }
    expected = base + extra / p_.total_speed;
  }
  return expected;
}

double Search::anchor_work(const Group& group) const {
  double work = 0.0;
  for (int32_t s : group.anchors) work += p_.work_s[s];
  return work;
}

// Step 2.
Grouping Search::settle(std::vector<Group> groups) {
  Grouping best, now;
  now.groups = std::move(groups);
  std::vector<double> overhead(now.groups.size(), 0.0);
  for (size_t k = 0; k < now.groups.size(); ++k) {
    const auto size = static_cast<int32_t>(now.groups[k].ranks.size());
    for (int32_t s : now.groups[k].anchors) overhead[k] += size * even_communication_s(p_, s, size, p_.num_ranks);
  }
  double best_makespan = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    fill(now, overhead);
    const double makespan = now.makespan_s();
    if (makespan < best_makespan) {
      best_makespan = makespan;
      best = now;
    }
    if (now.groups.size() != overhead.size()) break;
    for (size_t k = 0; k < now.groups.size(); ++k) {
      double work = anchor_work(now.groups[k]);
      for (const auto& item : now.bins[k].items) work += item.work_s;
      overhead[k] = now.bins[k].load_s - work;
    }
  }
  return best;
}

void Search::fill(Grouping& grouping, const std::vector<double>& overhead_s) {
  auto& [groups, bins] = grouping;
  std::vector<char> is_anchor(p_.lengths.size(), 0);
  bins.assign(groups.size(), Bin{});
  for (size_t k = 0; k < groups.size(); ++k) {
    bins[k].size = 0.0;
    bins[k].room = 0;
    for (int32_t r : groups[k].ranks) {
      bins[k].size += p_.speeds[r];
      bins[k].room += p_.max_tokens[r];
    }
    for (int32_t s : groups[k].anchors) {
      is_anchor[s] = 1;
      bins[k].room -= p_.lengths[s];
    }
    bins[k].load_s = anchor_work(groups[k]) + overhead_s[k];
  }
  std::vector<Item> fillers;
  for (int32_t s : order_) {
    if (!is_anchor[s]) fillers.push_back({s, p_.work_s[s], p_.lengths[s]});
  }
  auto left = pack(bins, fillers);
  refine(bins, kRefineSteps, kBreadth, 0.0);
  house(grouping, std::move(left));
  for (size_t k = 0; k < groups.size(); ++k) solve(grouping, k);
}

// Items that no bin has room for, and bins that hold too much: merge the two roomiest groups until there is room. The caps' sum
// holds all tokens, so that this ends.
void Search::house(Grouping& grouping, std::vector<Item> left) {
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

// Step 3.
void Search::improve(Grouping& grouping, int steps) {
  for (int step = 0; step < steps; ++step) {
    const size_t worst = highest_bin(grouping.bins);
    if (!exchange_items(grouping, worst) && !merge_groups(grouping, worst)) return;
  }
}

bool Search::exchange_items(Grouping& grouping, size_t worst) {
  auto& bins = grouping.bins;
  const double before = bins[worst].level() * (1.0 - kGain);
  std::vector<Change> changes;
  for (size_t to : lowest_bins(bins, kBreadth)) {
    if (to == worst) continue;
    const Change change = best_change(bins, worst, to, before);
    if (change.level < before) changes.push_back(change);
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.level < b.level; });
  for (const auto& change : changes) {
    const Bin from = bins[worst], to = bins[change.to];
    apply(bins, worst, change);
    solve(grouping, worst);
    solve(grouping, change.to);
    if (std::max(bins[worst].level(), bins[change.to].level()) < before) return true;
    bins[worst] = from;
    bins[change.to] = to;
  }
  return false;
}

bool Search::merge_groups(Grouping& grouping, size_t worst) {
  const double before = grouping.bins[worst].level() * (1.0 - kGain);
  size_t best = grouping.bins.size();
  double best_level = before;
  for (size_t other : lowest_bins(grouping.bins, kBreadth)) {
    if (other == worst) continue;
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
