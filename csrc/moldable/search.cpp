// Numbered steps:
//   1. Layouts for several targets and scales (layout.hpp), each distinct one once.
//   2. What each promises: the makespan at which its groups, anchors solved alone and their overhead kept, would hold all fillers
//      if those were a liquid. Sizes of the slowest or costliest anchors are changed by one while the promise falls.
//   3. The most promising are settled: fillers to the lowest group, moves and swaps by level, groups solved; once more with the
//      overhead that the groups then have.
//   4. The best of those are improved: moves and swaps between the slowest group and fast ones, confirmed by solving both; where
//      none helps, the slowest group merges with a fast one.
//   5. The lowest makespan wins.
#include "moldable/search.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace knapformer {
namespace {

constexpr double kFullEffort = 1500.0;  // sequences and ranks up to which nothing is cut short
constexpr int32_t kContainerRanks = 64;  // ranks up to which groups of several anchors are tried
constexpr double kTargets[] = {1.0, 1.01, 1.03, 1.06, 1.12};  // over the expected makespan
constexpr double kScales[] = {1.0, 0.8, 0.6, 0.45};
constexpr double kLeastScaleOfLarge = 0.7;  // in large steps
constexpr double kShares[] = {0.98, 0.7};
constexpr int kRounds = 2;
constexpr size_t kSettled = 12;
constexpr size_t kSettledContainers = 5;
constexpr size_t kImproved = 6;
constexpr size_t kBreadth = 12;
constexpr size_t kMergeBreadth = 12;
constexpr int kClimbs = 12;
constexpr int kRefineSteps = 400;
constexpr int kImproveSteps = 300;
constexpr double kGain = 1e-7;
constexpr double kFarOff = 1.06;       // over the best makespan so far: not worth a second round
constexpr double kLevelEnough = 1e-4;  // over the mean level: refined enough before the groups are solved

bool same_sizes(const std::vector<AnchorSize>& a, const std::vector<AnchorSize>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const AnchorSize& x, const AnchorSize& y) {
    return x.sequence == y.sequence && x.ranks == y.ranks;
  });
}

bool same_groups(const std::vector<Group>& a, const std::vector<Group>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Group& x, const Group& y) {
    return x.anchors == y.anchors && x.ranks == y.ranks;
  });
}

}  // namespace

double Grouping::makespan_s() const {
  double highest = 0.0;
  for (const auto& bin : bins) highest = std::max(highest, bin.level());
  return highest;
}

Search::Search(const Problem& problem) : p_(problem), solver_(problem) {
  const double parts = static_cast<double>(problem.lengths.size()) + problem.num_ranks;
  effort_ = std::min(1.0, kFullEffort / std::max(1.0, parts));
  const auto all_equal = [](const auto& values) {
    return std::all_of(values.begin(), values.end(), [&](const auto& value) { return value == values.front(); });
  };
  equal_ranks_ = all_equal(problem.speeds) && all_equal(problem.max_tokens);
}

Grouping Search::run() {
  const auto effort = [this](size_t full, size_t least) {
    return std::max(least, static_cast<size_t>(effort_ * static_cast<double>(full)));
  };
  std::vector<std::pair<double, Grouping>> settled;
  double best_settled = std::numeric_limits<double>::infinity();
  for (int32_t container : containers()) {
    auto candidates = layouts(container);
    climb(candidates);
    candidates.resize(std::min(candidates.size(), effort(container == 1 ? kSettled : kSettledContainers, 3)));
    for (const auto& candidate : candidates) {
      if (!settled.empty() && !candidate.is_packed && candidate.promise_s >= best_settled) continue;
      Grouping grouping = settle(candidate, best_settled);
      const double makespan = grouping.makespan_s();
      best_settled = std::min(best_settled, makespan);
      settled.push_back({makespan, std::move(grouping)});
    }
  }
  std::stable_sort(settled.begin(), settled.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  settled.resize(std::min(settled.size(), effort(kImproved, 2)));
  size_t best = 0;
  for (size_t k = 0; k < settled.size(); ++k) {
    improve(settled[k].second, kImproveSteps);
    settled[k].first = settled[k].second.makespan_s();
    if (settled[k].first < settled[best].first) best = k;
  }
  return std::move(settled[best].second);
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

// Step 1, best promise first.
std::vector<Search::Layout> Search::layouts(int32_t container) {
  const double expected = expected_makespan();
  std::vector<Layout> found;
  std::vector<std::vector<AnchorSize>> tried;
  for (double share : kShares) {
    for (double scale : kScales) {
      if (effort_ < 1.0 && scale < kLeastScaleOfLarge) continue;
      for (double target : kTargets) {
        auto sizes = size_anchors(p_, {target * expected, share, scale});
        const auto same = [&](const auto& other) { return same_sizes(sizes, other); };
        if (std::any_of(tried.begin(), tried.end(), same)) continue;
        tried.push_back(sizes);
        Layout layout = promise(std::move(sizes), container);
        const auto equal = [&](const Layout& other) { return same_groups(layout.groups, other.groups); };
        if (std::none_of(found.begin(), found.end(), equal)) found.push_back(std::move(layout));
      }
    }
  }
  const auto below = [](const Layout& a, const Layout& b) { return a.promise_s < b.promise_s; };
  std::stable_sort(found.begin(), found.end(), below);
  return found;
}

// Single ranks, and in small steps also pairs, fours and nodes.
std::vector<int32_t> Search::containers() const {
  std::vector<int32_t> sizes{1};
  if (effort_ < 1.0 || p_.num_ranks > kContainerRanks) return sizes;
  const int32_t node = largest_node(p_);
  for (int32_t size : {2, 4, node}) {
    if (size > sizes.back() && size <= node) sizes.push_back(size);
  }
  return sizes;
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
Search::Layout Search::promise(std::vector<AnchorSize> sizes, int32_t container) {
  Layout layout;
  layout.container = container;
  layout.groups = lay_out(p_, sizes, container);
  layout.sizes = std::move(sizes);
  layout.overhead_s.assign(layout.groups.size(), 0.0);
  for (size_t k = 0; k < layout.groups.size(); ++k) {
    const auto& group = layout.groups[k];
    if (group.anchors.empty()) continue;
    double size = 0.0;
    for (int32_t r : group.ranks) size += p_.speeds[r];
    const double alone = alone_s(group);
    if (std::isinf(alone)) {  // house() will merge it
      layout.promise_s = alone;
      continue;
    }
    layout.overhead_s[k] = alone * size - anchor_work(group);
    if (alone > layout.promise_s) {
      layout.promise_s = alone;
      layout.slowest = k;
    }
  }
  layout.promise_s = std::max({layout.promise_s, fill_level(layout), heaviest_filler_s(layout.sizes)});
  return layout;
}

// The makespan of a group's anchors without fillers. Equal ranks are told apart by their nodes only.
double Search::alone_s(const Group& group) {
  std::vector<int32_t> key = group.anchors;
  key.push_back(-1);
  int32_t last = -1;
  for (int32_t r : group.ranks) {
    if (!equal_ranks_) {
      key.push_back(r);
    } else if (p_.node_index[r] == last) {
      ++key.back();
    } else {
      key.push_back(1);
      last = p_.node_index[r];
    }
  }
  const auto [at, is_new] = alone_s_.try_emplace(std::move(key), 0.0);
  if (is_new) at->second = solver_.makespan(group, {});
  return at->second;
}

// The time of the heaviest sequence that is no anchor on the fastest rank; anchors are the heaviest sequences.
double Search::heaviest_filler_s(const std::vector<AnchorSize>& anchors) const {
  if (anchors.size() == p_.lengths.size()) return 0.0;
  return p_.work_s[p_.heaviest_first[anchors.size()]] / *std::max_element(p_.speeds.begin(), p_.speeds.end());
}

// The level up to which fillers, poured in, fill the groups. Where that leaves a group more tokens than its caps hold (at the
// fillers' mean work per token), the fillers are packed one by one instead, or, in large steps, the caps cut the pouring.
double Search::fill_level(Layout& layout) const {
  std::vector<Bin> bins = open_bins(layout.groups, layout.overhead_s);
  std::vector<double> size, base, most;
  double work = p_.total_work_s, tokens = 0.0, room = 0.0;
  for (int64_t length : p_.lengths) tokens += static_cast<double>(length);
  for (const auto& anchor : layout.sizes) {
    work -= p_.work_s[anchor.sequence];
    tokens -= static_cast<double>(p_.lengths[anchor.sequence]);
  }
  if (tokens <= 0.0 || work <= 0.0) return 0.0;
  for (const auto& bin : bins) {
    size.push_back(bin.size);
    base.push_back(bin.load_s);
    most.push_back(static_cast<double>(std::max<int64_t>(0, bin.room)) * (work / tokens));
    room += most.back();
  }
  std::vector<double> poured;
  water_fill(work, base, size, std::vector<double>(size.size(), std::numeric_limits<double>::infinity()), poured);
  bool overflow = false;
  for (size_t k = 0; k < size.size(); ++k) overflow = overflow || poured[k] > most[k];
  if (overflow && effort_ == 1.0) {
    layout.is_packed = true;
    const bool fits = pack(bins, fillers(layout.groups)).empty();
    return fits ? bins[Levels(bins).highest()].level() : std::numeric_limits<double>::infinity();
  }
  if (overflow && room < work) return std::numeric_limits<double>::infinity();
  if (overflow) water_fill(work, base, size, most, poured);
  double level = 0.0;
  for (size_t k = 0; k < size.size(); ++k) {
    if (poured[k] > 0.0) level = std::max(level, (base[k] + poured[k]) / size[k]);
  }
  return level;
}

// From the best layout: one rank more or less for an anchor, as long as the promise falls. Those found come first.
void Search::climb(std::vector<Layout>& layouts) {
  const int rounds = std::max(3, static_cast<int>(effort_ * kClimbs));
  for (int round = 0; round < rounds && !layouts[0].sizes.empty(); ++round) {
    Layout best;
    best.promise_s = layouts[0].promise_s * (1.0 - 1e-5);
    bool found = false;
    for (size_t k = 0; k < layouts[0].sizes.size(); ++k) {
      const auto& slow = layouts[0].groups[layouts[0].slowest].anchors;
      const bool slowest = std::find(slow.begin(), slow.end(), layouts[0].sizes[k].sequence) != slow.end();
      if (!slowest && k >= 6) continue;
      for (int32_t step : {1, -1, 2, 4}) {
        auto sizes = layouts[0].sizes;
        sizes[k].ranks += step;
        if (sizes[k].ranks < 2 || sizes[k].ranks > p_.num_ranks) continue;
        Layout next = promise(std::move(sizes), layouts[0].container);
        if (next.promise_s < best.promise_s) {
          best = std::move(next);
          found = true;
        }
      }
    }
    if (!found) return;
    layouts.insert(layouts.begin(), std::move(best));
  }
}

// Step 3.
Grouping Search::settle(const Layout& layout, double best_s) {
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
    if (now.groups.size() != overhead.size() || makespan > kFarOff * best_s) break;
    for (size_t k = 0; k < now.groups.size(); ++k) {
      double work = anchor_work(now.groups[k]);
      for (const auto& item : now.bins[k].items) work += item.work_s;
      overhead[k] = now.bins[k].load_s - work;
    }
  }
  return best;
}

// Bins that hold their groups' anchors and overhead.
std::vector<Bin> Search::open_bins(const std::vector<Group>& groups, const std::vector<double>& overhead_s) const {
  std::vector<Bin> bins(groups.size());
  for (size_t k = 0; k < groups.size(); ++k) {
    bins[k].size = 0.0;
    bins[k].room = 0;
    for (int32_t r : groups[k].ranks) {
      bins[k].size += p_.speeds[r];
      bins[k].room += p_.max_tokens[r];
    }
    for (int32_t s : groups[k].anchors) bins[k].room -= p_.lengths[s];
    bins[k].load_s = anchor_work(groups[k]) + overhead_s[k];
  }
  return bins;
}

// The sequences that are no anchors, heaviest first.
std::vector<Item> Search::fillers(const std::vector<Group>& groups) const {
  std::vector<char> is_anchor(p_.lengths.size(), 0);
  for (const auto& group : groups) {
    for (int32_t s : group.anchors) is_anchor[s] = 1;
  }
  std::vector<Item> items;
  for (int32_t s : p_.heaviest_first) {
    if (!is_anchor[s]) items.push_back({s, p_.work_s[s], p_.lengths[s]});
  }
  return items;
}

void Search::fill(Grouping& grouping, const std::vector<double>& overhead_s) {
  grouping.bins = open_bins(grouping.groups, overhead_s);
  const auto left = pack(grouping.bins, fillers(grouping.groups));
  double load = 0.0, size = 0.0;
  for (const auto& bin : grouping.bins) {
    load += bin.load_s;
    size += bin.size;
  }
  refine(grouping.bins, kRefineSteps, kBreadth, load / size * (1.0 + kLevelEnough));
  house(grouping, left);
  for (size_t k = 0; k < grouping.groups.size(); ++k) solve(grouping, k);
}

// Items that no bin has room for, and bins that hold too much: merge the two roomiest groups until there is room. The caps' sum
// holds all tokens, so that this ends.
void Search::house(Grouping& grouping, const std::vector<Item>& left) {
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

// Step 4.
void Search::improve(Grouping& grouping, int steps) {
  Levels levels(grouping.bins);
  for (int step = 0; step < steps; ++step) {
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
  for (size_t to : levels.lowest(kBreadth)) {
    const Change change = best_change(bins, worst, to, before);
    if (change.level < before) changes.push_back(change);
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.level < b.level; });
  for (const auto& change : changes) {
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
  for (size_t other : levels.lowest(kMergeBreadth)) {
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
