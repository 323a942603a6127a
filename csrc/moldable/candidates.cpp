#include "moldable/candidates.hpp"

#include <algorithm>
#include <cmath>

namespace knapformer {
namespace {

constexpr int32_t kContainerRanks = 1024;  // ranks up to which groups of several anchors are tried
constexpr double kTargets[] = {1.0, 1.01, 1.03, 1.06, 1.12};  // over the expected makespan
constexpr double kScales[] = {1.0, 0.8, 0.6, 0.45};
constexpr double kLeastScaleOfLarge = 0.7;  // in large steps
constexpr double kShares[] = {0.98, 0.7};
constexpr int kAdjustments = 12;
constexpr size_t kHeaviestAnchors = 6;  // whose groups are adjusted
constexpr int32_t kMoreRanks[] = {1, -1, 2, 4};

bool same_sizes(const std::vector<AnchorSize>& a, const std::vector<AnchorSize>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const AnchorSize& x, const AnchorSize& y) {
    return x.sequence == y.sequence && x.ranks == y.ranks;
  });
}

}  // namespace

Candidates::Candidates(const Problem& problem, double share_of_tries) : p_(problem), solver_(problem), share_of_tries_(share_of_tries) {
  const auto all_equal = [](const auto& values) {
    return std::all_of(values.begin(), values.end(), [&](const auto& value) { return value == values.front(); });
  };
  equal_ranks_ = all_equal(problem.speeds) && all_equal(problem.max_tokens);
}

std::vector<Candidate> Candidates::of(int32_t container, bool free_small) {
  const double expected = expected_makespan();
  std::vector<Candidate> found;
  std::vector<std::vector<AnchorSize>> tried;
  for (double share : kShares) {
    for (double scale : kScales) {
      if (share_of_tries_ < 1.0 && scale < kLeastScaleOfLarge) continue;
      for (double target : kTargets) {
        for (bool whole_nodes : {false, true}) {
          auto sizes = size_anchors(p_, {target * expected, share, scale, whole_nodes});
          if (free_small) {
            const auto small = [&](const AnchorSize& anchor) { return anchor.ranks <= container; };
            sizes.erase(std::remove_if(sizes.begin(), sizes.end(), small), sizes.end());
          }
          const auto same = [&](const auto& other) { return same_sizes(sizes, other); };
          if (std::any_of(tried.begin(), tried.end(), same)) continue;
          tried.push_back(sizes);
          Candidate layout = estimate(std::move(sizes), container);
          const auto equal = [&](const Candidate& other) { return same_groups(layout.groups, other.groups); };
          if (std::none_of(found.begin(), found.end(), equal)) found.push_back(std::move(layout));
        }
      }
    }
  }
  const auto below = [](const Candidate& a, const Candidate& b) { return a.estimate_s < b.estimate_s; };
  std::stable_sort(found.begin(), found.end(), below);
  adjust_sizes(found);
  return found;
}

// Single ranks, and in small steps also pairs, fours and nodes.
std::vector<int32_t> Candidates::containers() const {
  std::vector<int32_t> sizes{1};
  if (p_.num_ranks > kContainerRanks) return sizes;
  const int32_t node = largest_node(p_);
  for (int32_t size : {2, 4, node}) {
    if (size > sizes.back() && size <= node) sizes.push_back(size);
  }
  return sizes;
}

// The lower bound plus the communication of the smallest groups that would meet it, spread over all ranks. The makespan is on
// both sides, so it is computed three times.
double Candidates::expected_makespan() const {
  const double base = p_.lower_bound_s();
  double expected = base;
  const double mean_speed = p_.total_speed / p_.num_ranks;
  for (int round = 0; round < 3; ++round) {
    double extra = 0.0;
    for (const auto& anchor : size_anchors(p_, {std::max(expected, base) * 1.005, 1.0, 1.0, false})) {
      extra += anchor.ranks * mean_speed * even_communication_s(p_, anchor.sequence, anchor.ranks, p_.num_ranks);
    }
    expected = base + extra / p_.total_speed;
  }
  return expected;
}

Candidate Candidates::estimate(std::vector<AnchorSize> sizes, int32_t container) {
  Candidate layout;
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
    if (std::isinf(alone)) {  // Search::make_room will merge it
      layout.estimate_s = alone;
      continue;
    }
    layout.overhead_s[k] = alone * size - anchor_work_s(p_, group);
    if (alone > layout.estimate_s) {
      layout.estimate_s = alone;
      layout.slowest = k;
    }
  }
  layout.estimate_s = std::max({layout.estimate_s, fill_level(layout), heaviest_filler_s(layout.sizes, container)});
  return layout;
}

// The makespan of a group's anchors without fillers. Equal ranks are told apart by their nodes only.
double Candidates::alone_s(const Group& group) {
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

// The time of the heaviest filler on the fastest rank. Anchors are the heaviest sequences.
double Candidates::heaviest_filler_s(const std::vector<AnchorSize>& anchors, int32_t container) const {
  if (anchors.size() == p_.lengths.size()) return 0.0;
  return p_.work_s[p_.heaviest_first[anchors.size()]] / container / *std::max_element(p_.speeds.begin(), p_.speeds.end());
}

// The level up to which the fillers, poured in like a liquid, fill the groups. A group may then hold more tokens than its caps
// allow (at the fillers' mean work per token). In small steps the fillers are packed one by one in that case. In large steps no
// more is poured into a group than its caps allow.
double Candidates::fill_level(Candidate& layout) const {
  std::vector<Bin> bins = open_bins(p_, layout.groups, layout.overhead_s);
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
  if (overflow && share_of_tries_ == 1.0) {
    layout.is_packed = true;
    const bool fits = pack(bins, fillers_of(p_, layout.groups)).empty();
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

// The layouts found come first.
void Candidates::adjust_sizes(std::vector<Candidate>& layouts) {
  const int rounds = std::max(3, static_cast<int>(share_of_tries_ * kAdjustments));
  for (int round = 0; round < rounds && !layouts[0].sizes.empty(); ++round) {
    Candidate best;
    best.estimate_s = layouts[0].estimate_s * (1.0 - 1e-5);
    bool found = false;
    for (size_t k = 0; k < layouts[0].sizes.size(); ++k) {
      const auto& slow = layouts[0].groups[layouts[0].slowest].anchors;
      const bool is_slowest = std::find(slow.begin(), slow.end(), layouts[0].sizes[k].sequence) != slow.end();
      if (!is_slowest && k >= kHeaviestAnchors) continue;
      for (int32_t more : kMoreRanks) {
        auto sizes = layouts[0].sizes;
        sizes[k].ranks += more;
        if (sizes[k].ranks < 2 || sizes[k].ranks > p_.num_ranks) continue;
        Candidate next = estimate(std::move(sizes), layouts[0].container);
        if (next.estimate_s < best.estimate_s) {
          best = std::move(next);
          found = true;
        }
      }
    }
    if (!found) return;
    layouts.insert(layouts.begin(), std::move(best));
  }
}

bool same_groups(const std::vector<Group>& a, const std::vector<Group>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Group& x, const Group& y) {
    return x.anchors == y.anchors && x.ranks == y.ranks;
  });
}

double anchor_work_s(const Problem& problem, const Group& group) {
  double work = 0.0;
  for (int32_t s : group.anchors) work += problem.work_s[s];
  return work;
}

std::vector<Bin> open_bins(const Problem& problem, const std::vector<Group>& groups, const std::vector<double>& overhead_s) {
  std::vector<Bin> bins(groups.size());
  for (size_t k = 0; k < groups.size(); ++k) {
    bins[k].size = 0.0;
    bins[k].room = 0;
    for (int32_t r : groups[k].ranks) {
      bins[k].size += problem.speeds[r];
      bins[k].room += problem.max_tokens[r];
    }
    for (int32_t s : groups[k].anchors) bins[k].room -= problem.lengths[s];
    bins[k].load_s = anchor_work_s(problem, groups[k]) + overhead_s[k];
  }
  return bins;
}

std::vector<Item> fillers_of(const Problem& problem, const std::vector<Group>& groups) {
  std::vector<char> is_anchor(problem.lengths.size(), 0);
  for (const auto& group : groups) {
    for (int32_t s : group.anchors) is_anchor[s] = 1;
  }
  std::vector<Item> items;
  for (int32_t s : problem.heaviest_first) {
    if (!is_anchor[s]) items.push_back({s, problem.work_s[s], problem.lengths[s]});
  }
  return items;
}

}  // namespace knapformer
