// Planning for two lanes: ranks run the sequences of one lane while the exchanges of the other are under way (docs/planning.md).
//
// Then a rank's time is all that it computes, and what exchanges take of its speed. Only the SUM of its linear phase and its attention
// has to be level, so that heads may be uneven as long as tokens make up for it. A meeting has to fit in its lane: its largest linear
// phase, attention and communication take no longer than the makespan.
#pragma once

#include <utility>
#include <vector>

#include "problem.hpp"

namespace knapformer {

// A part of a sequence's work, in seconds at speed 1.
struct Share {
  int32_t rank;
  double work_s;
};

// How full ranks are made.
struct Target {
  double makespan_s;       // what a rank of speed 1 takes, exchanges included
  double largest_share = 1;  // of a split sequence on one rank, as a part of the makespan: the rest is room for its exchange
};

// The phase "spread": which ranks share each sequence's work, and how much of it each takes. Heaviest first, whole on the rank with the
// most time left where it fits, otherwise over the emptiest ranks of one node, and of several nodes where one has not enough.
std::vector<std::vector<Share>> spread(const Problem& problem, const Target& target);

// The phase "cut": tokens and heads for shares of one sequence. Heads are whole where tokens can make up for the rounding; otherwise
// heads are cut at query rows, too. `room` (N,) are the tokens that ranks may still hold; what the sequence takes is subtracted.
Placement cut(const Problem& problem, int32_t sequence, std::vector<Share> shares, std::vector<int64_t>& room);

// The phase "deal": the lane of each sequence of any plan, so that the slowest meeting of either lane is as fast as possible. Split
// sequences first, largest share first, then whole ones. Empty where nothing is split: one lane is enough.
std::vector<int8_t> deal(const Problem& problem, const PlanView& plan);

// The best of several targets, of `moldable`'s and of `ulysses`' plan dealt to two lanes.
PlanColumns plan_two_lanes(const Problem& problem);

}  // namespace knapformer
