#include "moldable/relabel.hpp"

#include <algorithm>
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

// The whole sequences, grouped by length, in order of length and id.
std::vector<std::vector<int32_t>> equal_sequences(const Problem& p, const std::vector<Placement>& placements) {
  std::vector<int32_t> whole;
  for (size_t s = 0; s < placements.size(); ++s) {
    if (is_whole(placements[s])) whole.push_back(static_cast<int32_t>(s));
  }
  std::stable_sort(whole.begin(), whole.end(), [&](int32_t a, int32_t b) { return p.lengths[a] < p.lengths[b]; });
  std::vector<std::vector<int32_t>> classes;
  for (int32_t s : whole) {
    if (classes.empty() || p.lengths[classes.back().front()] != p.lengths[s]) classes.emplace_back();
    classes.back().push_back(s);
  }
  return classes;
}

// How often each rank occurs, by rank.
std::vector<std::pair<int32_t, int64_t>> counts(std::vector<int32_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::vector<std::pair<int32_t, int64_t>> found;
  for (int32_t r : ranks) {
    if (found.empty() || found.back().first != r) found.push_back({r, 0});
    ++found.back().second;
  }
  return found;
}

// Stays.
std::vector<Stay> stays(const Problem& p, const std::vector<Placement>& placements) {
  std::vector<Stay> found;
  for (size_t s = 0; s < placements.size(); ++s) {
    if (is_whole(placements[s])) continue;
    for (const auto& x : placements[s].segments) found.push_back({x.rank, p.homes[s], static_cast<double>(x.end - x.start)});
  }
  for (const auto& sequences : equal_sequences(p, placements)) {
    std::vector<int32_t> held, homes;
    for (int32_t s : sequences) {
      held.push_back(placements[s].segments[0].rank);
      homes.push_back(p.homes[s]);
    }
    const auto held_counts = counts(std::move(held)), home_counts = counts(std::move(homes));
    const auto length = static_cast<double>(p.lengths[sequences.front()]);
    for (const auto& [from, places] : held_counts) {
      for (const auto& [to, own] : home_counts) found.push_back({from, to, length * static_cast<double>(std::min(places, own))});
    }
  }
  return found;
}

// What must be equal for two ranks to be exchanged inside matched nodes.
std::pair<double, int64_t> kind(const Problem& p, int32_t rank) { return {p.speeds[rank], p.max_tokens[rank]}; }

// The ranks of each node, and each rank's position among them.
struct NodeRanks {
  explicit NodeRanks(const Problem& p) : ranks(static_cast<size_t>(p.num_nodes)), position(p.num_ranks) {
    for (int32_t r = 0; r < p.num_ranks; ++r) {
      position[r] = ranks[p.node_index[r]].size();
      ranks[p.node_index[r]].push_back(r);
    }
  }
  std::vector<std::vector<int32_t>> ranks;
  std::vector<size_t> position;
};

// The node whose names each node's ranks get. Only nodes with the same kinds of ranks are matched.
std::vector<size_t> match_nodes(const Problem& p, const NodeRanks& nodes, const std::vector<Stay>& stays) {
  const size_t n = nodes.ranks.size();
  std::vector<std::vector<std::pair<double, int64_t>>> kinds(n);
  for (size_t a = 0; a < n; ++a) {
    for (int32_t r : nodes.ranks[a]) kinds[a].push_back(kind(p, r));
    std::sort(kinds[a].begin(), kinds[a].end());
  }
  std::vector<double> value(n * n, kForbidden);
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = 0; b < n; ++b) value[a * n + b] = kinds[a] == kinds[b] ? 0.0 : kForbidden;
  }
  for (const auto& x : stays) {
    double& v = value[p.node_index[x.from] * n + p.node_index[x.to]];
    if (v >= 0.0) v += x.tokens;
  }
  return best_assignment(value, n);
}

// Names: the new rank of each rank.
std::vector<int32_t> new_ranks(const Problem& p, const std::vector<Stay>& stays) {
  const NodeRanks nodes(p);
  const auto node_of = match_nodes(p, nodes, stays);
  std::vector<std::vector<double>> value(nodes.ranks.size());
  for (size_t n = 0; n < nodes.ranks.size(); ++n) {
    for (int32_t i : nodes.ranks[n]) {
      for (int32_t r : nodes.ranks[node_of[n]]) value[n].push_back(kind(p, i) == kind(p, r) ? 0.0 : kForbidden);
    }
  }
  for (const auto& x : stays) {
    const auto n = static_cast<size_t>(p.node_index[x.from]);
    if (node_of[n] != static_cast<size_t>(p.node_index[x.to])) continue;
    double& v = value[n][nodes.position[x.from] * nodes.ranks[n].size() + nodes.position[x.to]];
    if (v >= 0.0) v += x.tokens;
  }
  std::vector<int32_t> renamed(p.num_ranks);
  for (size_t n = 0; n < nodes.ranks.size(); ++n) {
    const auto to = best_assignment(value[n], nodes.ranks[n].size());
    for (size_t i = 0; i < nodes.ranks[n].size(); ++i) renamed[nodes.ranks[n][i]] = nodes.ranks[node_of[n]][to[i]];
  }
  return renamed;
}

// Equal sequences.
void exchange_equals(const Problem& p, std::vector<Placement>& placements) {
  for (const auto& sequences : equal_sequences(p, placements)) {
    if (sequences.size() < 2) continue;
    std::vector<int32_t> held;
    for (int32_t s : sequences) held.push_back(placements[s].segments[0].rank);
    auto places = counts(std::move(held));
    std::vector<int32_t> away;
    const auto put = [&](int32_t s, int32_t rank) {
      placements[s].segments[0].rank = rank;
      placements[s].tiles[0].rank = rank;
    };
    for (int32_t s : sequences) {
      const auto own = std::find_if(places.begin(), places.end(), [&](const auto& x) { return x.first == p.homes[s]; });
      if (own != places.end() && own->second > 0) {
        --own->second;
        put(s, own->first);
      } else {
        away.push_back(s);
      }
    }
    auto next = places.begin();
    for (int32_t s : away) {
      while (next->second == 0) ++next;
      --next->second;
      put(s, next->first);
    }
  }
}

// Pairs by falling value, each where both are still free.
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

// The Hungarian method: rows are assigned one by one, each along a shortest augmenting path with potentials. Rows and columns count
// from 1, and 0 stands for none. A pair that is not allowed costs more than any permutation of allowed ones.
class Hungarian {
 public:
  Hungarian(const std::vector<double>& value, size_t n)
      : value_(value),
        n_(n),
        forbidden_cost_(1.0 + 2.0 * static_cast<double>(n) * *std::max_element(value.begin(), value.end())),
        row_potential_(n + 1, 0.0),
        column_potential_(n + 1, 0.0),
        row_of_(n + 1, 0) {}

  std::vector<size_t> columns() {
    for (size_t row = 1; row <= n_; ++row) assign(row);
    std::vector<size_t> column(n_);
    for (size_t j = 1; j <= n_; ++j) column[row_of_[j] - 1] = j - 1;
    return column;
  }

 private:
  double cost(size_t i, size_t j) const {
    const double v = value_[(i - 1) * n_ + (j - 1)];
    return v < 0.0 ? forbidden_cost_ : -v;
  }

  void assign(size_t new_row) {
    const double infinite = std::numeric_limits<double>::infinity();
    std::vector<double> least(n_ + 1, infinite);
    std::vector<size_t> previous(n_ + 1, 0);
    std::vector<char> done(n_ + 1, 0);
    size_t at = 0;
    row_of_[0] = new_row;
    do {
      done[at] = 1;
      const size_t row = row_of_[at];
      size_t next = 0;
      double step = infinite;
      for (size_t j = 1; j <= n_; ++j) {
        if (done[j]) continue;
        const double reduced = cost(row, j) - row_potential_[row] - column_potential_[j];
        if (reduced < least[j]) {
          least[j] = reduced;
          previous[j] = at;
        }
        if (least[j] < step) {
          step = least[j];
          next = j;
        }
      }
      shift_potentials(step, done, least);
      at = next;
    } while (row_of_[at] != 0);
    for (; at != 0; at = previous[at]) row_of_[at] = row_of_[previous[at]];
  }

  void shift_potentials(double step, const std::vector<char>& done, std::vector<double>& least) {
    for (size_t j = 0; j <= n_; ++j) {
      if (done[j]) {
        row_potential_[row_of_[j]] += step;
        column_potential_[j] -= step;
      } else {
        least[j] -= step;
      }
    }
  }

  const std::vector<double>& value_;
  size_t n_;
  double forbidden_cost_;
  std::vector<double> row_potential_, column_potential_;
  std::vector<size_t> row_of_;  // of each column
};

}  // namespace

std::vector<size_t> best_assignment(const std::vector<double>& value, size_t n) {
  return n > kExactAssignment ? greedy_assignment(value, n) : Hungarian(value, n).columns();
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
