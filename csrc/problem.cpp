#include "problem.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace knapformer {

void Problem::prepare() {
  work_s.resize(lengths.size());
  for (size_t s = 0; s < lengths.size(); ++s) {
    work_s[s] = linear_s_per_token * static_cast<double>(lengths[s]) + attention_s[s];
  }
  total_work_s = std::accumulate(work_s.begin(), work_s.end(), 0.0);
  total_speed = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  heaviest_first.resize(lengths.size());
  std::iota(heaviest_first.begin(), heaviest_first.end(), 0);
  std::stable_sort(heaviest_first.begin(), heaviest_first.end(), [this](int32_t a, int32_t b) { return work_s[a] > work_s[b]; });
  node_index.assign(num_ranks, 0);
  std::vector<int32_t> seen;
  for (int32_t r = 0; r < num_ranks; ++r) {
    auto found = std::find(seen.rbegin(), seen.rend(), nodes[r]);
    if (found == seen.rend()) {
      seen.push_back(nodes[r]);
      node_index[r] = static_cast<int32_t>(seen.size()) - 1;
    } else {
      node_index[r] = static_cast<int32_t>(seen.rend() - found) - 1;
    }
  }
  num_nodes = static_cast<int32_t>(seen.size());
}

Placement whole_on(const Problem& problem, int32_t sequence, int32_t rank) {
  const int64_t length = problem.lengths[sequence];
  return {{{rank, 0, length}}, {{rank, 0, problem.num_heads, 0, length}}};
}

void PlanColumns::add_segment(int32_t rank, int64_t start, int64_t end) {
  if (end <= start) return;
  segment_rank.push_back(rank);
  segment_start.push_back(start);
  segment_end.push_back(end);
}

void PlanColumns::add_tile(int32_t rank, int32_t head_start, int32_t head_end, int64_t query_start, int64_t query_end) {
  if (head_end <= head_start || query_end <= query_start) return;
  tile_rank.push_back(rank);
  tile_head_start.push_back(head_start);
  tile_head_end.push_back(head_end);
  tile_query_start.push_back(query_start);
  tile_query_end.push_back(query_end);
}

void PlanColumns::end_sequence() {
  segment_offsets.push_back(static_cast<int64_t>(segment_rank.size()));
  tile_offsets.push_back(static_cast<int64_t>(tile_rank.size()));
}

void PlanColumns::add_whole(const Problem& problem, int32_t sequence, int32_t rank) {
  const int64_t length = problem.lengths[sequence];
  add_segment(rank, 0, length);
  add_tile(rank, 0, problem.num_heads, 0, length);
  end_sequence();
}

void PlanColumns::add_even(const Problem& problem, int32_t sequence, int32_t first_rank, int32_t count) {
  const int64_t length = problem.lengths[sequence];
  const int64_t heads = problem.num_heads;
  for (int64_t k = 0; k < count; ++k) {
    const auto rank = first_rank + static_cast<int32_t>(k);
    add_segment(rank, length * k / count, length * (k + 1) / count);
    add_tile(rank, static_cast<int32_t>(heads * k / count), static_cast<int32_t>(heads * (k + 1) / count), 0, length);
  }
  end_sequence();
}

void PlanColumns::add_placement(Placement&& placement) {
  auto& [segments, tiles] = placement;
  std::sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) { return a.start < b.start; });
  std::sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
    return std::tie(a.head_start, a.query_start) < std::tie(b.head_start, b.query_start);
  });
  for (const auto& x : segments) add_segment(x.rank, x.start, x.end);
  for (const auto& x : tiles) add_tile(x.rank, x.head_start, x.head_end, x.query_start, x.query_end);
  end_sequence();
}

PlanView PlanColumns::view() const {
  return {static_cast<int32_t>(segment_offsets.size()) - 1,
          lane.empty() ? 1 : 2,
          lane.empty() ? nullptr : lane.data(),
          segment_offsets.data(),
          segment_rank.data(),
          segment_start.data(),
          segment_end.data(),
          tile_offsets.data(),
          tile_rank.data(),
          tile_head_start.data(),
          tile_head_end.data(),
          tile_query_start.data(),
          tile_query_end.data()};
}

}  // namespace knapformer
