#include "moldable/relabel.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace knapformer {
namespace {

constexpr double kForbidden = -1.0;
constexpr size_t kExactAssignment = 128;        // rows up to which an assignment is the best one
constexpr size_t kMostPairs = size_t{1} << 20;  // of ranks that hold equal sequences and ranks that loaded them

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
    const bool is_large = held_counts.size() * home_counts.size() > kMostPairs;
    for (const auto& [from, places] : held_counts) {
      for (const auto& [to, own] : home_counts) {
        if (!is_large || from == to) found.push_back({from, to, length * static_cast<double>(std::min(places, own))});
      }
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

// A value of matching row and column.
struct Pair {
  size_t row, column;
  double value;
};

// Rows and columns to be matched one to one, each only with its kind. Of each kind there are as many rows as columns.
struct Matching {
  std::vector<int32_t> row_kind, column_kind;
  std::vector<Pair> pairs;  // of whatever kinds; several of one row and column are added
  bool allows(size_t row, size_t column) const { return row_kind[row] == column_kind[column]; }
};

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

// Pairs by falling value, each where both are still free; then the rows left, each with the first column of its kind.
std::vector<size_t> greedy_columns(const Matching& given) {
  const size_t n = given.row_kind.size();
  std::vector<Pair> pairs;
  for (const auto& x : given.pairs) {
    if (given.allows(x.row, x.column)) pairs.push_back(x);
  }
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const Pair& a, const Pair& b) { return std::tie(a.row, a.column) < std::tie(b.row, b.column); });
  std::vector<Pair> sums;
  for (const auto& x : pairs) {
    const bool is_same = !sums.empty() && sums.back().row == x.row && sums.back().column == x.column;
    is_same ? void(sums.back().value += x.value) : sums.push_back(x);
  }
  std::stable_sort(sums.begin(), sums.end(), [](const Pair& a, const Pair& b) { return a.value > b.value; });
  std::vector<size_t> column(n, n);
  std::vector<char> taken(n, 0);
  const auto match = [&](size_t i, size_t j) {
    column[i] = j;
    taken[j] = 1;
  };
  for (const auto& x : sums) {
    if (x.value > 0.0 && column[x.row] == n && !taken[x.column]) match(x.row, x.column);
  }
  std::map<int32_t, std::vector<size_t>> free;  // columns of each kind, the first one last
  for (size_t j = n; j-- > 0;) {
    if (!taken[j]) free[given.column_kind[j]].push_back(j);
  }
  for (size_t i = 0; i < n; ++i) {
    if (column[i] != n) continue;
    auto& columns = free[given.row_kind[i]];
    match(i, columns.back());
    columns.pop_back();
  }
  return column;
}

// The column of each row, so that the values add up to the most; greedy above `kExactAssignment` rows.
std::vector<size_t> best_columns(const Matching& given) {
  const size_t n = given.row_kind.size();
  if (n > kExactAssignment) return greedy_columns(given);
  std::vector<double> value(n * n, kForbidden);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      if (given.allows(i, j)) value[i * n + j] = 0.0;
    }
  }
  for (const auto& x : given.pairs) {
    double& v = value[x.row * n + x.column];
    if (v >= 0.0) v += x.value;
  }
  return Hungarian(value, n).columns();
}

// The number of each kind, in order of first sight.
template <typename Kind>
class Kinds {
 public:
  int32_t of(const Kind& kind) { return seen_.try_emplace(kind, static_cast<int32_t>(seen_.size())).first->second; }

 private:
  std::map<Kind, int32_t> seen_;
};

// The node whose names each node's ranks get. Only nodes with the same kinds of ranks are matched.
std::vector<size_t> match_nodes(const Problem& p, const NodeRanks& nodes, const std::vector<Stay>& stays) {
  Matching matching;
  Kinds<std::vector<std::pair<double, int64_t>>> seen;
  for (const auto& ranks : nodes.ranks) {
    std::vector<std::pair<double, int64_t>> kinds;
    for (int32_t r : ranks) kinds.push_back(kind(p, r));
    std::sort(kinds.begin(), kinds.end());
    matching.row_kind.push_back(seen.of(kinds));
  }
  matching.column_kind = matching.row_kind;
  for (const auto& x : stays) {
    matching.pairs.push_back({static_cast<size_t>(p.node_index[x.from]), static_cast<size_t>(p.node_index[x.to]), x.tokens});
  }
  return best_columns(matching);
}

// Names: the new rank of each rank.
std::vector<int32_t> new_ranks(const Problem& p, const std::vector<Stay>& stays) {
  const NodeRanks nodes(p);
  const auto node_of = match_nodes(p, nodes, stays);
  std::vector<Matching> matchings(nodes.ranks.size());
  Kinds<std::pair<double, int64_t>> seen;
  for (size_t n = 0; n < nodes.ranks.size(); ++n) {
    for (int32_t i : nodes.ranks[n]) matchings[n].row_kind.push_back(seen.of(kind(p, i)));
    for (int32_t r : nodes.ranks[node_of[n]]) matchings[n].column_kind.push_back(seen.of(kind(p, r)));
  }
  for (const auto& x : stays) {
    const auto n = static_cast<size_t>(p.node_index[x.from]);
    if (node_of[n] != static_cast<size_t>(p.node_index[x.to])) continue;
    matchings[n].pairs.push_back({nodes.position[x.from], nodes.position[x.to], x.tokens});
  }
  std::vector<int32_t> renamed(p.num_ranks);
  for (size_t n = 0; n < nodes.ranks.size(); ++n) {
    const auto to = best_columns(matchings[n]);
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
      const auto own = std::lower_bound(places.begin(), places.end(), std::pair(p.homes[s], int64_t{0}));
      if (own != places.end() && own->first == p.homes[s] && own->second > 0) {
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

}  // namespace

void keep_home(const Problem& problem, std::vector<Placement>& placements) {
  const auto renamed = new_ranks(problem, stays(problem, placements));
  for (auto& placement : placements) {
    for (auto& x : placement.segments) x.rank = renamed[x.rank];
    for (auto& x : placement.tiles) x.rank = renamed[x.rank];
  }
  exchange_equals(problem, placements);
}

}  // namespace knapformer
