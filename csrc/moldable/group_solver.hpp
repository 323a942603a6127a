// A group: ranks that share some sequences among them. The groups of a plan are disjoint.
#pragma once

#include <utility>
#include <vector>

#include "packing.hpp"
#include "problem.hpp"

namespace knapformer {

struct Group {
  std::vector<int32_t> ranks;    // by node, then id
  std::vector<int32_t> anchors;  // sequences that are always split, heaviest first
};

// The phase "sharing" (docs/planning.md): places the sequences of one group on its ranks.
//   Levels. How much of the linear phase and of attention each rank would carry if both were spread by the ranks' speeds.
//   Fillers. They are taken heaviest first. Each stays whole on the rank where the fuller of the two phases ends lowest. What
//      happens to a filler that would rise above a level is said by the `FillRule`.
//   Attention. The split sequences' attention fills each rank up to one level (water filling). The `SplitRule` says whether each
//      sequence goes over all ranks or the sequences follow one another from rank to rank.
//   Heads. A rank's share of attention becomes whole heads. What is left of a head becomes a share of its query rows where that
//      pays. Rows go where possible to a rank of the node that holds these tokens.
//   Tokens. They level the linear phase in the same way, to the token and under the token caps.
//   Cost. Every combination of rules is priced as evaluate() will price the plan (group_cost.cpp). The cheapest one wins.
class GroupSolver {
 public:
  explicit GroupSolver(const Problem& problem) : p_(problem) {}

  // Infinite where the caps cannot hold the group's tokens.
  double makespan(const Group& group, const std::vector<Item>& fillers);
  // The placements that `makespan` priced, into `placements` by sequence.
  void place(const Group& group, const std::vector<Item>& fillers, std::vector<Placement>& placements);
  // What has been done so far, in steps of the inner loops. All ranks count the same, so that a limit on it cuts all alike.
  size_t steps() const { return steps_; }

 private:
  enum class FillRule {
    kSplitAboveLevels,  // a filler that would rise above a level is split
    kNeverSplit,        // it stays whole all the same
    kFirstUnderLevels,  // a filler goes to the first rank where it stays under the levels, not to the lowest
  };
  enum class SplitRule {
    kOverAllRanks,  // each split sequence has a share of all ranks
    kInTurn,        // the split sequences follow one another from rank to rank, so that neighbours share a rank
    kByNode,        // each split sequence has a share of all ranks of one node; only those that fit into no node cross nodes
    kInTurnByNode,  // as kByNode, but inside a node the sequences follow one another from rank to rank
  };
  static bool is_by_node(SplitRule rule) { return rule == SplitRule::kByNode || rule == SplitRule::kInTurnByNode; }
  struct HeadRule {
    double rounding;    // a share this near to a whole head becomes one; at 0.5 no head is shared
    bool one_head_each; // a rank's rows come from one shared head only, so that it needs k and v of no second one
  };
  struct Variant {
    FillRule fill = FillRule::kSplitAboveLevels;
    SplitRule split = SplitRule::kOverAllRanks;
    HeadRule heads = {0.5, false};
    double cost_s = std::numeric_limits<double>::infinity();
  };
  // Heads × tokens that a rank sends and receives before and after attention.
  struct Flow {
    double before_out = 0, before_in = 0, after_out = 0, after_in = 0;
  };

  Variant best_variant(const Group& group, const std::vector<Item>& fillers);
  void try_split_rules(FillRule fill, Variant& best);
  bool set_levels(const Group& group, const std::vector<Item>& fillers);
  void place_fillers(const Group& group, const std::vector<Item>& fillers, FillRule rule);
  int32_t best_rank(const Item& item, double linear, double attention, FillRule rule, double* height) const;
  void share(SplitRule rule, const HeadRule& heads);
  void share_attention(SplitRule rule, const HeadRule& heads);
  void choose_heads(size_t k, SplitRule rule, double rest_s);
  void choose_nodes();
  bool crosses_nodes(size_t k) const;
  void choose_heads_by_node(size_t k, SplitRule rule);
  void share_tokens_by_node(SplitRule rule, std::vector<int64_t>& left);
  void take_tokens(size_t k, size_t n, int64_t tokens, double part, std::vector<int64_t>& left);
  void cut_heads(size_t k, const HeadRule& rule);
  void add_heads(int32_t* heads, int64_t left);
  void take_heads(int32_t* heads, int64_t too_many);
  void lay_rows_end_to_end(size_t k, int64_t shared_heads, double rounding);
  void lay_rows_by_head(size_t k, int64_t shared_heads);
  std::vector<size_t> order_of_rows(double wanted, int64_t shared_heads) const;
  void share_tokens(SplitRule rule);
  void emit(const std::vector<Item>& fillers, std::vector<Placement>& placements) const;
  void emit_tiles(size_t k, Placement& placement) const;

  // group_cost.cpp
  double cost_s();
  void add_phases();
  double meeting_s(size_t k) const;
  void add_flows(size_t k);
  void add_row_flows(size_t k);
  void count_peers();
  double communication_s(size_t i) const;

  size_t num_nodes() const { return node_begin_.size() - 1; }
  size_t cell(size_t k, size_t i) const { return k * num_ranks_ + i; }
  double attention_s_per_head(size_t k) const { return p_.attention_s[split_[k]] / p_.num_heads; }

  const Problem& p_;
  size_t steps_ = 0;

  // The group's ranks (g) and levels.
  size_t num_ranks_ = 0;
  std::vector<int32_t> rank_, node_;
  std::vector<double> speed_, cap_;
  double linear_level_ = 0, attention_level_ = 0;  // tokens and seconds per unit of speed

  // Fillers that stay whole.
  std::vector<int32_t> filler_rank_;                      // of each filler, as a position in rank_; -1: it is split
  std::vector<double> filler_tokens_, filler_attention_;  // (g) their tokens and attention seconds at speed 1

  // Split sequences (K): anchors, then fillers that were split.
  std::vector<int32_t> split_;
  std::vector<int32_t> whole_heads_;                 // (K, g)
  std::vector<int64_t> shared_rows_, first_row_;     // (K, g) query rows of shared heads, laid end to end, and the first of them
  std::vector<double> touched_heads_;                // (K, g) heads of which a rank computes any row
  std::vector<int64_t> tokens_;                      // (K, g)

  // Of the rules kByNode and kInTurnByNode.
  std::vector<size_t> node_begin_;       // (nodes + 1) of the group's ranks
  std::vector<double> node_attention_s_; // (K, nodes) attention of each split sequence in each node
  std::vector<double> node_rest_s_;      // (nodes) that of the sequences that have no heads yet

  // Used while one sequence is shared out (g).
  std::vector<double> attention_so_far_, attention_share_, wanted_heads_;
  std::vector<size_t> order_, sharing_order_;

  // Used while the cost is computed.
  std::vector<double> linear_s_, attention_s_;                     // (g)
  std::vector<Flow> near_, far_;                                   // (g) inside and between nodes
  std::vector<double> node_tokens_, node_touched_, node_heads_;    // (nodes) of one sequence
  std::vector<int64_t> segment_end_;                               // (g) of one sequence
  std::vector<std::pair<size_t, size_t>> row_pairs_;               // ranks that exchange rows of shared heads
  std::vector<char> before_peers_, after_peers_;                   // (g, g) whether two ranks exchange anything
  std::vector<double> peers_;                                      // (g) of both exchanges
};

// Shares out_i = clamp(level · speed_i − load_i, 0, most_i) that sum to `total`; the mosts must sum to at least that.
void water_fill(double total, const std::vector<double>& load, const std::vector<double>& speed,
                const std::vector<double>& most, std::vector<double>& out);

// Rounds `real` to integers of the same sum `total`, none above floor(most).
std::vector<int64_t> round_to_sum(const std::vector<double>& real, const std::vector<double>& most, int64_t total);

}  // namespace knapformer
