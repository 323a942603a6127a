#include "moldable/relabel.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace knapformer {
namespace {

constexpr double kForbidden = -1.0;

bool is_whole(const Placement& placement) {
  return placement.segments.size() == 1 && placement.tiles.size() == 1 && placement.segments[0].rank == placement.tiles[0].rank;
}

// `tokens` stay where they are if plan rank `from` becomes rank `to`.
struct Stay {
  int32_t from, to;
  double tokens;
};

using Counts = std::map<int32_t, int64_t>;  // by rank

// Step 1.
std::vector<Stay> stays(const Problem& p, const std::vector<Placement>& placements) {
  std::map<int64_t, std::pair<Counts, Counts>> by_length;  // ranks that hold whole ones, ranks where they are at home
  std::vector<Stay> found;
  for (size_t s = 0; s < placements.size(); ++s) {
    if (is_whole(placements[s])) {
      auto& [held, homes] = by_length[p.lengths[s]];
      ++held[placements[s].segments[0].rank];
      ++homes[p.homes[s]];
    } else {
      for (const auto& x : placements[s].segments) {
        found.push_back({x.rank, p.homes[s], static_cast<double>(x.end - x.start)});
      }
    }
  }
  for (const auto& [length, counts] : by_length) {
    for (const auto& [from, held] : counts.first) {
      for (const auto& [to, homes] : counts.second) {
        found.push_back({from, to, static_cast<double>(length * std::min(held, homes))});
      }
    }
  }
  return found;
}

// What must be equal for two ranks to be exchanged inside matched nodes.
std::pair<double, int64_t> kind(const Problem& p, int32_t rank) { return {p.speeds[rank], p.max_tokens[rank]}; }

// Step 2: the new rank of each rank.
std::vector<int32_t> new_ranks(const Problem& p, const std::vector<Stay>& stays) {
  const auto num_nodes = static_cast<size_t>(p.num_nodes);
  std::vector<std::vector<int32_t>> nodes(num_nodes);
  std::vector<size_t> place(p.num_ranks);  // of a rank in its node
  for (int32_t r = 0; r < p.num_ranks; ++r) {
    place[r] = nodes[p.node_index[r]].size();
    nodes[p.node_index[r]].push_back(r);
  }
  std::vector<std::vector<std::pair<double, int64_t>>> kinds(num_nodes);
  for (size_t n = 0; n < num_nodes; ++n) {
    for (int32_t r : nodes[n]) kinds[n].push_back(kind(p, r));
    std::sort(kinds[n].begin(), kinds[n].end());
  }
  std::vector<double> value(num_nodes * num_nodes, kForbidden);
  for (size_t a = 0; a < num_nodes; ++a) {
    for (size_t b = 0; b < num_nodes; ++b) value[a * num_nodes + b] = kinds[a] == kinds[b] ? 0.0 : kForbidden;
  }
  for (const auto& x : stays) {
    double& v = value[p.node_index[x.from] * num_nodes + p.node_index[x.to]];
    if (v >= 0.0) v += x.tokens;
  }
  const auto node_of = best_assignment(value, num_nodes);
  std::vector<std::vector<double>> inside(num_nodes);
  for (size_t n = 0; n < num_nodes; ++n) {
    for (int32_t i : nodes[n]) {
      for (int32_t r : nodes[node_of[n]]) inside[n].push_back(kind(p, i) == kind(p, r) ? 0.0 : kForbidden);
    }
  }
  for (const auto& x : stays) {
    const auto n = static_cast<size_t>(p.node_index[x.from]);
    if (node_of[n] != static_cast<size_t>(p.node_index[x.to])) continue;
    double& v = inside[n][place[x.from] * nodes[n].size() + place[x.to]];
    if (v >= 0.0) v += x.tokens;
  }
  std::vector<int32_t> renamed(p.num_ranks);
  for (size_t n = 0; n < num_nodes; ++n) {
    const auto to = best_assignment(inside[n], nodes[n].size());
    for (size_t i = 0; i < nodes[n].size(); ++i) renamed[nodes[n][i]] = nodes[node_of[n]][to[i]];
  }
  return renamed;
}

// Step 3.
void exchange_equals(const Problem& p, std::vector<Placement>& placements) {
  std::map<int64_t, std::vector<size_t>> by_length;
  for (size_t s = 0; s < placements.size(); ++s) {
    if (is_whole(placements[s])) by_length[p.lengths[s]].push_back(s);
  }
  for (const auto& [length, sequences] : by_length) {
    std::map<int32_t, int64_t> places;  // free places by rank
    for (size_t s : sequences) ++places[placements[s].segments[0].rank];
    std::vector<size_t> away;
    const auto put = [&](size_t s, int32_t rank) {
      placements[s] = {{{rank, 0, length}}, {{rank, 0, p.num_heads, 0, length}}};
      if (--places[rank] == 0) places.erase(rank);
    };
    for (size_t s : sequences) {
      if (places.count(p.homes[s]) > 0) {
        put(s, p.homes[s]);
      } else {
        away.push_back(s);
      }
    }
    for (size_t s : away) put(s, places.begin()->first);
  }
}

std::vector<size_t> greedy_assignment(const std::vector<double>& value, size_t n) {
  std::vector<std::tuple<double, size_t, size_t>> pairs;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      if (value[i * n + j] > 0.0) pairs.push_back({-value[i * n + j], i, j});
    }
  }
  std::sort(pairs.begin(), pairs.end());
  std::vector<size_t> column(n, n);
  std::vector<char> taken(n, 0);
  const auto match = [&](size_t i, size_t j) {
    if (column[i] != n || taken[j] || value[i * n + j] < 0.0) return;
    column[i] = j;
    taken[j] = 1;
  };
  for (const auto& [minus, i, j] : pairs) match(i, j);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n && column[i] == n; ++j) match(i, j);
  }
  return column;
}

}  // namespace

// The Hungarian method: rows one by one, each along a shortest augmenting path with potentials. A pair that is not allowed costs
// more than any permutation of allowed ones.
std::vector<size_t> best_assignment(const std::vector<double>& value, size_t n) {
  if (n > kExactAssignment) return greedy_assignment(value, n);
  const double infinite = std::numeric_limits<double>::infinity();
  const double forbidden_cost = 1.0 + 2.0 * static_cast<double>(n) * *std::max_element(value.begin(), value.end());
  const auto cost = [&](size_t i, size_t j) {
    const double v = value[(i - 1) * n + (j - 1)];
    return v < 0.0 ? forbidden_cost : -v;
  };
  std::vector<double> row_potential(n + 1, 0.0), column_potential(n + 1, 0.0);
  std::vector<size_t> row_of(n + 1, 0), previous(n + 1, 0);
  for (size_t i = 1; i <= n; ++i) {
    std::vector<double> least(n + 1, infinite);
    std::vector<char> done(n + 1, 0);
    size_t at = 0;
    row_of[0] = i;
    do {
      done[at] = 1;
      const size_t row = row_of[at];
      size_t next = 0;
      double step = infinite;
      for (size_t j = 1; j <= n; ++j) {
        if (done[j]) continue;
        const double reduced = cost(row, j) - row_potential[row] - column_potential[j];
        if (reduced < least[j]) {
          least[j] = reduced;
          previous[j] = at;
        }
        if (least[j] < step) {
          step = least[j];
          next = j;
        }
      }
      for (size_t j = 0; j <= n; ++j) {
        if (done[j]) {
          row_potential[row_of[j]] += step;
          column_potential[j] -= step;
        } else {
          least[j] -= step;
        }
      }
      at = next;
    } while (row_of[at] != 0);
    for (; at != 0; at = previous[at]) row_of[at] = row_of[previous[at]];
  }
  std::vector<size_t> column(n);
  for (size_t j = 1; j <= n; ++j) column[row_of[j] - 1] = j - 1;
  return column;
}

void keep_home(const Problem& problem, std::vector<Placement>& placements) {
  const auto renamed = new_ranks(problem, stays(problem, placements));
  for (auto& placement : placements) {
    for (auto& x : placement.segments) x.rank = renamed[x.rank];
    for (auto& x : placement.tiles) x.rank = renamed[x.rank];
  }
  exchange_equals(problem, placements);
}

}  // namespace knapformer
