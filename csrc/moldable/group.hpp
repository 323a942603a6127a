// A group: ranks that share some sequences among them. The groups of a plan are disjoint.
#pragma once

#include <vector>

#include "packing.hpp"
#include "problem.hpp"

namespace knapformer {

struct Group {
  std::vector<int32_t> ranks;    // by node, then id
  std::vector<int32_t> anchors;  // sequences that are always split, heaviest first
};

// Places the sequences of one group on its ranks. Numbered steps:
//   1. Levels: the linear phase and the attention that each rank would carry if both were spread by speed.
//   2. Fillers, heaviest first, stay whole on the rank where the fuller of the two phases ends lowest. One that would rise
//      above a level is split too, or, in the loose variant, stays whole.
//   3. The split sequences' attention fills each rank up to one level (water filling); their tokens do the same for the linear
//      phase, under the token caps. Several split sequences go over all ranks together, or over ranks in turn.
//   4. Attention shares become whole heads; what is left of a head becomes a share of its query rows where that pays.
//      Rows go where possible to a rank of the node that holds these tokens.
//   5. The cheapest variant under the cost model wins; it is priced as evaluate() will price the plan.
class GroupSolver {
 public:
  explicit GroupSolver(const Problem& problem) : p_(problem) {}

  // Infinite where the caps cannot hold the group's tokens.
  double makespan(const Group& group, const std::vector<Item>& fillers);
  // The placements that `makespan` priced, into `placements` by sequence.
  void place(const Group& group, const std::vector<Item>& fillers, std::vector<Placement>& placements);
  // What has been done so far, in steps of its inner loops: a clock that runs alike on all ranks.
  size_t work() const { return work_; }

 private:
  enum class Fill { kLevel, kLoose, kPiled };
  struct Variant {
    Fill fill = Fill::kLevel;
    bool together = true;
    double snap = 0.5;
    double cost = std::numeric_limits<double>::infinity();
  };
  struct Flow {
    double before_out = 0, before_in = 0, after_out = 0, after_in = 0;
  };

  Variant best_variant(const Group& group, const std::vector<Item>& fillers);
  void try_shares(Fill fill, Variant& best);
  bool open(const Group& group, const std::vector<Item>& fillers);
  void fill(const Group& group, const std::vector<Item>& fillers, Fill how);
  int32_t best_rank(const Item& item, double linear, double attention, Fill how, double* height) const;
  void share(bool together, double snap);
  void share_attention(bool together, double snap);
  void want_attention(size_t k, bool together, double rest);
  void cut_heads(size_t k, double snap);
  void add_heads(int32_t* heads, int64_t left);
  void pool_rows(size_t k, int64_t pool_heads, double snap);
  std::vector<size_t> pool_order(double sum, int64_t pool_heads) const;
  void share_tokens(bool together);
  double price();
  void price_flows(size_t k);
  void price_pieces(size_t k);
  double communication(size_t i) const;
  void emit(const std::vector<Item>& fillers, std::vector<Placement>& placements) const;
  void emit_tiles(size_t k, Placement& placement) const;

  const Problem& p_;
  size_t g_ = 0;
  size_t work_ = 0;
  std::vector<int32_t> rank_, node_;
  std::vector<double> speed_, cap_;
  double linear_level_ = 0, attention_level_ = 0;            // per unit of speed
  std::vector<double> tokens_, attention_;                   // of whole sequences, speed-1 units
  std::vector<int32_t> whole_rank_;                          // of each filler; -1: split
  std::vector<int32_t> split_;                               // sequences
  std::vector<double> need_, want_, budget_, load_;          // (g)
  std::vector<int32_t> heads_;                               // (K, g) whole heads
  std::vector<int64_t> piece_, piece_start_;                 // (K, g) rows of pooled heads, and the first of them
  std::vector<double> kv_;                                   // (K, g) heads touched
  std::vector<int64_t> held_;                                // (K, g) tokens
  std::vector<Flow> near_, far_;                             // (g)
  std::vector<double> node_tokens_, node_kv_, node_heads_;
  std::vector<size_t> order_;                                // (g)
  std::vector<int64_t> segment_end_;                         // (g) of one sequence
};

// Shares out_i = clamp(level · speed_i − load_i, 0, most_i) that sum to `total`; the mosts must sum to at least that.
void water_fill(double total, const std::vector<double>& load, const std::vector<double>& speed,
                const std::vector<double>& most, std::vector<double>& out);

// Rounds `real` to integers of the same sum `total`, none above floor(most).
std::vector<int64_t> round_to_sum(const std::vector<double>& real, const std::vector<double>& most, int64_t total);

}  // namespace knapformer
