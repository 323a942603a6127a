#include "moldable/contest.hpp"

#include <algorithm>
#include <numeric>

#include "moldable/relabel.hpp"
#include "simple_planners.hpp"

namespace knapformer {

bool Contest::enter(PlanColumns plan, const std::string& reason) {
  const Evaluation score = evaluate(p_, plan.view());
  for (int32_t r = 0; r < p_.num_ranks; ++r) {
    if (score.tokens[r] > p_.max_tokens[r]) return false;
  }
  if (plan_ ? !better(score) : score.makespan_s >= below_s_) return true;
  plan_ = std::move(plan);
  plan_->reason = reason + where_;
  score_ = score;
  return true;
}

bool Contest::enter_placements(std::vector<Placement> placements, const std::string& reason) {
  keep_home(p_, placements);
  PlanColumns plan;
  for (auto& placement : placements) plan.add_placement(std::move(placement));
  return enter(std::move(plan), reason);
}

void Contest::replace(PlanColumns plan) {
  score_ = evaluate(p_, plan.view());
  plan_ = std::move(plan);
}

bool Contest::better(const Evaluation& other) const {
  if (other.makespan_s != score_.makespan_s) return other.makespan_s < score_.makespan_s;
  if (other.bytes != score_.bytes) return other.bytes < score_.bytes;
  return other.num_split < score_.num_split;
}

void enter_whole(const Problem& problem, Contest& contest) {
  for (bool keep_caps : {false, true}) {
    const auto rank_of = choose_whole(problem, keep_caps);
    if (!rank_of) return;
    std::vector<Placement> placements;
    for (size_t s = 0; s < rank_of->size(); ++s) placements.push_back(whole_on(problem, static_cast<int32_t>(s), (*rank_of)[s]));
    if (contest.enter_placements(std::move(placements), "whole sequences")) return;
  }
}

double heaviest_alone_s(const Problem& problem) {
  if (problem.work_s.empty()) return 0.0;
  return *std::max_element(problem.work_s.begin(), problem.work_s.end()) /
         *std::max_element(problem.speeds.begin(), problem.speeds.end());
}

namespace {

// Ranks of the smallest and of the largest node.
std::pair<int32_t, int32_t> node_sizes(const Problem& problem) {
  std::vector<int32_t> count(problem.num_nodes, 0);
  for (int32_t n : problem.node_index) ++count[n];
  const auto [smallest, largest] = std::minmax_element(count.begin(), count.end());
  return {*smallest, *largest};
}

// Seconds of rank time that even splits over at least `ranks` ranks must communicate, summed over the ranks: q, k, v and output of
// the heads that its tokens' ranks, or their nodes', do not compute. Equal parts are rounded down to whole tokens, which this allows for.
class EvenTraffic {
 public:
  EvenTraffic(const Problem& problem, double ranks) : ranks_(ranks), nodes_(ranks / node_sizes(problem).second) {
    const double fast = std::max(problem.intra_bytes_per_s, problem.inter_bytes_per_s);
    const double bytes_per_row = 4.0 * problem.communication_scale * problem.num_heads * problem.bytes_per_head_token;
    s_per_row_ = bytes_per_row / fast;
    more_s_per_far_row_ = bytes_per_row * (1.0 / problem.inter_bytes_per_s - 1.0 / fast);
  }

  double seconds(int64_t length) const {
    if (static_cast<double>(length) < ranks_) return 0.0;
    return s_per_row_ * leaving(length, ranks_) + more_s_per_far_row_ * leaving(length, nodes_);
  }

 private:
  static double leaving(int64_t length, double parts) {
    return std::max(0.0, static_cast<double>(length) * (1.0 - 1.0 / parts) - 1.0);
  }

  double ranks_, nodes_, s_per_row_, more_s_per_far_row_;
};

double slowest_of(const Problem& problem) { return *std::min_element(problem.speeds.begin(), problem.speeds.end()); }
double fastest_of(const Problem& problem) { return *std::max_element(problem.speeds.begin(), problem.speeds.end()); }

// A makespan that even splits over at least `size` ranks each cannot beat: the work and communication of every sequence that has a
// token for each of those ranks. Of more ranks than there are heads, some compute no attention.
double even_split_bound_s(const Problem& problem, int32_t size) {
  const EvenTraffic traffic(problem, size);
  double exchanged_s = 0.0;
  for (int64_t length : problem.lengths) exchanged_s += traffic.seconds(length);
  const double attention_s = std::accumulate(problem.attention_s.begin(), problem.attention_s.end(), 0.0);
  return std::max((problem.total_work_s + slowest_of(problem) * exchanged_s) / problem.total_speed,
                  attention_s * std::max(1.0, static_cast<double>(size) / problem.num_heads) / (problem.num_ranks * fastest_of(problem)));
}

// A makespan that the plan of bags of `size` ranks cannot beat: as above, for each bag with what it holds.
double bags_bound_s(const Problem& problem, int32_t size) {
  const BagChoice choice = choose_bags(problem, std::vector<int32_t>(problem.num_ranks / size, size));
  const EvenTraffic traffic(problem, size);
  const double slowest = slowest_of(problem);
  std::vector<double> load_s(problem.num_ranks / size, 0.0);
  for (int32_t s = 0; s < problem.num_sequences(); ++s) {
    load_s[choice.first_rank[s] / size] += problem.work_s[s] + slowest * traffic.seconds(problem.lengths[s]);
  }
  return *std::max_element(load_s.begin(), load_s.end()) / (fastest_of(problem) * size);
}

double home_makespan_s(const Problem& problem) {
  std::vector<double> load(problem.num_ranks, 0.0);
  for (int32_t s = 0; s < problem.num_sequences(); ++s) load[problem.homes[s]] += problem.work_s[s];
  double highest = 0.0;
  for (int32_t r = 0; r < problem.num_ranks; ++r) highest = std::max(highest, load[r] / problem.speeds[r]);
  return highest;
}

}  // namespace

// A bound is compared with a little room for its own rounding.
void enter_others(const Problem& problem, Contest& contest) {
  const auto has_chance = [&](double bound_s) { return bound_s * (1.0 - 1e-12) < contest.makespan_s(); };
  if (has_chance(home_makespan_s(problem))) contest.enter(plan_home(problem), "home");
  const auto [smallest, largest] = node_sizes(problem);
  const double alone_s = heaviest_alone_s(problem);  // on one rank: shared evenly, it takes as many times less as there are ranks
  if (has_chance(alone_s / largest) && has_chance(even_split_bound_s(problem, smallest))) contest.enter(plan_ulysses(problem), "ulysses");
  for (int32_t size = 1; size <= problem.num_ranks && problem.num_ranks % size == 0; size *= 2) {
    const double bound = size == 1 ? problem.lower_bound_s() : even_split_bound_s(problem, size);
    if (!has_chance(std::max(bound, alone_s / size)) || !has_chance(bags_bound_s(problem, size))) continue;
    const int32_t bags = problem.num_ranks / size;
    contest.enter(plan_bags(problem, std::vector<int32_t>(bags, size)),
                  "bags:g" + std::to_string(size) + "n" + std::to_string(bags));
  }
}

}  // namespace knapformer
