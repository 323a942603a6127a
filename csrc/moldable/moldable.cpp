// The phases of moldable (docs/planning.md and csrc/README.md name them too):
//   Whole. Whole sequences are packed, unless one of them alone exceeds the lower bound. If the result is as good as the bound,
//      nothing is split.
//   Layouts (layout.hpp), estimates (candidates.hpp), packing and improving (search.hpp), sharing inside a group
//      (group_solver.hpp). They find the groups and what goes into them.
//   Home (relabel.hpp). Equal ranks and equal sequences are exchanged so that more tokens stay home.
//   Contest. The other planners' plans are compared too, where a quick bound leaves them a chance and they keep the caps. The
//      lowest makespan wins, then the fewest bytes, then the fewest splits.
//   Fewer ranks. Where the winner is far from the tight bound, all phases are run for fewer ranks too, as long as their bound is lower.
#include "moldable/moldable.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "bounds.hpp"
#include "evaluation.hpp"
#include "moldable/relabel.hpp"
#include "moldable/search.hpp"
#include "simple_planners.hpp"

namespace knapformer {
namespace {

constexpr double kFarOff = 1.04;      // over the tight bound: then fewer ranks are tried
constexpr int32_t kManyRanks = 1024;  // above, few counts of ranks are tried: they gain less and cost more
constexpr int32_t kTriedRanks = 4096;  // ranks of those tries together, but one try at least
constexpr double kGoodEnough = 1e-4;  // relative distance from the lower bound at which whole sequences are left alone

class Contest {
 public:
  explicit Contest(const Problem& problem) : p_(problem) {}

  double makespan_s() const { return plan_ ? score_.makespan_s : std::numeric_limits<double>::infinity(); }
  PlanColumns winner() { return std::move(*plan_); }

  // Whether the plan keeps the caps.
  bool enter(PlanColumns plan) {
    const Evaluation score = evaluate(p_, plan.view());
    for (int32_t r = 0; r < p_.num_ranks; ++r) {
      if (score.tokens[r] > p_.max_tokens[r]) return false;
    }
    if (plan_ && !better(score)) return true;
    plan_ = std::move(plan);
    score_ = score;
    return true;
  }

  // The same for placements, which first get the phase "home".
  bool enter_placements(std::vector<Placement> placements) {
    keep_home(p_, placements);
    PlanColumns plan;
    for (auto& placement : placements) plan.add_placement(std::move(placement));
    return enter(std::move(plan));
  }

 private:
  bool better(const Evaluation& other) const {
    if (other.makespan_s != score_.makespan_s) return other.makespan_s < score_.makespan_s;
    if (other.bytes != score_.bytes) return other.bytes < score_.bytes;
    return other.num_split < score_.num_split;
  }

  const Problem& p_;
  std::optional<PlanColumns> plan_;
  Evaluation score_;
};

// The phase "whole": first without the caps, then under them if the first plan breaks one.
void enter_whole(const Problem& problem, Contest& contest) {
  for (bool keep_caps : {false, true}) {
    const auto rank_of = choose_whole(problem, keep_caps);
    if (!rank_of) return;
    std::vector<Placement> placements;
    for (size_t s = 0; s < rank_of->size(); ++s) placements.push_back(whole_on(problem, static_cast<int32_t>(s), (*rank_of)[s]));
    if (contest.enter_placements(std::move(placements))) return;
  }
}

double heaviest_alone_s(const Problem& problem) {
  if (problem.work_s.empty()) return 0.0;
  return *std::max_element(problem.work_s.begin(), problem.work_s.end()) /
         *std::max_element(problem.speeds.begin(), problem.speeds.end());
}

// A makespan that even splits over at least `size` ranks each cannot beat. It is the work and the communication of every sequence
// that has a token for each of those ranks: q, k, v and output of the heads that its tokens' ranks do not compute. Equal parts are
// rounded down to whole tokens, which the bound allows for. Of more ranks than there are heads, some compute no attention.
double even_split_bound_s(const Problem& problem, int32_t size) {
  const double g = size;
  double bytes = 0.0;
  for (int64_t length : problem.lengths) {
    if (length < size) continue;
    const double moved = static_cast<double>(length) * (1.0 - 1.0 / g) - 1.0;
    bytes += 4.0 * std::max(0.0, moved) * problem.num_heads * problem.bytes_per_head_token;
  }
  const double slowest = *std::min_element(problem.speeds.begin(), problem.speeds.end());
  const double link = std::max(problem.intra_bytes_per_s, problem.inter_bytes_per_s);
  const double fastest = *std::max_element(problem.speeds.begin(), problem.speeds.end());
  const double attention_s = std::accumulate(problem.attention_s.begin(), problem.attention_s.end(), 0.0);
  return std::max((problem.total_work_s + slowest * problem.communication_scale * bytes / link) / problem.total_speed,
                  attention_s * std::max(1.0, g / problem.num_heads) / (problem.num_ranks * fastest));
}

double home_makespan_s(const Problem& problem) {
  std::vector<double> load(problem.num_ranks, 0.0);
  for (int32_t s = 0; s < problem.num_sequences(); ++s) load[problem.homes[s]] += problem.work_s[s];
  double highest = 0.0;
  for (int32_t r = 0; r < problem.num_ranks; ++r) highest = std::max(highest, load[r] / problem.speeds[r]);
  return highest;
}

int32_t smallest_node(const Problem& problem) {
  std::vector<int32_t> count(problem.num_nodes, 0);
  for (int32_t n : problem.node_index) ++count[n];
  return *std::min_element(count.begin(), count.end());
}

// The phase "contest". A bound is compared with a little room for its own rounding.
void enter_others(const Problem& problem, Contest& contest) {
  const auto has_chance = [&](double bound_s) { return bound_s * (1.0 - 1e-12) < contest.makespan_s(); };
  if (has_chance(home_makespan_s(problem))) contest.enter(plan_home(problem));
  if (has_chance(even_split_bound_s(problem, smallest_node(problem)))) contest.enter(plan_ulysses(problem));
  for (int32_t size = 1; size <= problem.num_ranks && problem.num_ranks % size == 0; size *= 2) {
    const double bound = size == 1 ? heaviest_alone_s(problem) : even_split_bound_s(problem, size);
    if (!has_chance(std::max(bound, problem.lower_bound_s()))) continue;
    contest.enter(plan_bags(problem, std::vector<int32_t>(problem.num_ranks / size, size)));
  }
}

// The first `count` ranks alone. Sequences of the others have their home on the last of these.
Problem first_ranks(const Problem& problem, int32_t count) {
  Problem first = problem;
  first.num_ranks = count;
  first.speeds.resize(count);
  first.nodes.resize(count);
  first.max_tokens.resize(count);
  for (auto& home : first.homes) home = std::min(home, count - 1);
  first.prepare();
  return first;
}

bool caps_hold(const Problem& problem) {
  int64_t room = 0, tokens = 0;
  for (int64_t cap : problem.max_tokens) room += cap;
  for (int64_t length : problem.lengths) tokens += length;
  return tokens <= room;
}

// The phases from "whole" to "contest" for a problem of all ranks or of the first of them.
void compete(const Problem& problem, Contest& contest) {
  const double bound = problem.lower_bound_s();
  const double alone = heaviest_alone_s(problem);
  const bool whole_first = alone <= bound * (1.0 + kGoodEnough);
  if (whole_first) enter_whole(problem, contest);
  if (contest.makespan_s() > bound * (1.0 + kGoodEnough)) {
    Search search(problem);
    contest.enter_placements(search.place(search.run()));
  }
  if (!whole_first && alone < contest.makespan_s()) enter_whole(problem, contest);
  enter_others(problem, contest);
}

// N less 1, 2, 4, ... ranks, down to N / 2, then N / 4, N / 8, ...; the first of these only where N is large.
std::vector<int32_t> fewer_counts(int32_t num_ranks) {
  std::vector<int32_t> counts;
  for (int32_t less = 1; 2 * less < num_ranks; less *= 2) counts.push_back(num_ranks - less);
  for (int32_t count = num_ranks / 2; count > 0; count /= 2) counts.push_back(count);
  if (num_ranks > kManyRanks) counts.resize(std::min<size_t>(counts.size(), std::max(1, kTriedRanks / num_ranks)));
  return counts;
}

// The phase "fewer ranks".
void enter_fewer(const Problem& problem, Contest& contest) {
  if (problem.effort == Effort::kFast) return;
  if (problem.total_work_s <= 0.0 || contest.makespan_s() <= kFarOff * tight_bound_s(problem)) return;
  for (int32_t count : fewer_counts(problem.num_ranks)) {
    const Problem fewer = first_ranks(problem, count);
    if (fewer.lower_bound_s() >= contest.makespan_s()) break;
    if (caps_hold(fewer) && tight_bound_s(fewer) < contest.makespan_s()) compete(fewer, contest);
  }
}

}  // namespace

PlanColumns plan_moldable(const Problem& problem) {
  Contest contest(problem);
  compete(problem, contest);
  enter_fewer(problem, contest);
  return contest.winner();
}

}  // namespace knapformer
