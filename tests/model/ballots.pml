// SPDX-License-Identifier: Apache-2.0
// The agreement by messages on who is a member and which call is over (src/survive/ballots.hpp), and
// how ranks use it that wait for the end of a call or settle a loss (src/survive/message_roll.hpp,
// survival.hpp).
//
// Checked, for ranks that are neither dead nor out: those that are members for each other have returned
// from each call with the same members, and are members of the same sets; nobody makes a call again from
// which a rank with which it goes on has returned; no call is over for a rank that does not have all it
// needs of it. Of any two ranks, one at most returns from a call without the other, and then the other
// has returned from no later one. Every rank ends all its calls: if ranks die, whoever has heard what of
// them; if one that lives is taken for silent; and on the side of a cut that has more than half of the
// ranks. If several of these happen, ranks may wait until their time is up, but for the last that lives.
//
// What a rank says goes to all others, and comes at any moment, in order on each connection. Of a rank
// that dies each other one hears as much as it happens to, and sees its end after that, or before (of a
// process of the same host), or hears of it by a vote. A cut divides the ranks for ever: nothing comes
// from the other side any more, not even what was sent before, and who is awaited there is taken for
// silent. A rank that lives is taken for silent by any other at any moment. What a rank hears and what
// it says to that are one step, as they are under the mutex. It returns from a call in the step in which
// that is over: until it comes to the next one it does nothing that others could see. A rank that is
// out, or leaves, is as one that dies. The ranks are alike, so rank 0 is the first that dies, then
// rank 1. What can change nothing, now or later, is heard at once.
//
// A rank that is left out, and has not heard of that or cannot, beyond a cut, may have returned from the
// last call that the others make again without it, since its arrival has not come to them. Only one more
// round in each call would prevent that.
//
// Left out: ranks that join again (Wish::kBack), which tests/unit/survive/world.hpp has; time, so that nobody waits before it gives up a rank,
// and no deadline ends anything; beats and mail; what is exchanged in an attempt (cpu.pml). That a rank
// which has new members votes no more for an end of the old epoch is no mutation: whoever hears such a
// vote has heard of the members before, on the same connection, and has taken them, or needs no vote of
// that rank.
//
// Mutations, each of which makes the check fail:
//   NO_MAJORITY              a silent rank is left out by any number
//   FORGETS_COMMITTED        the last call that is over in the next epoch is the decider's own
//   COUNTS_AFTER_VOTE        a rank that has voted still counts calls as over
//   ANY_VOTES                it is enough that all that stay have voted, for whatever
//   KEEPS_ITS_FIRST          a vote does not grow by what others wish
//   TAKES_FROM_THE_LEFT_OUT  a set of members is taken from a rank that the own vote leaves out
//   ONLY_DECIDERS_TELL       who takes members from another rank tells nobody of them
//   EXACT_CALL               an arrival at a later call does not count for the one before
//   ARRIVES_IN_NO_EPOCH      an arrival says the call alone
//   ARRIVED_STAY             a dead rank that has arrived is not voted out, though its vote is missing
//   STAYS_SILENT             a rank that was voted out for its silence is not voted out for its end
#ifndef N
#define N 3  // ranks
#endif
#ifndef C
#define C 2  // calls
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef SUSPICIONS
#define SUSPICIONS 1  // of ranks that live
#endif
#ifndef CUTS
#define CUTS 1
#endif
#define MOST_UNHEARD 10  // messages of a rank

#define EVERY_RANK ((1 << N) - 1)
#define BIT(m) (1 << (m))
#define HAS(set, m) (((set) & BIT(m)) != 0)
#define SIZE(set) (((set) & 1) + ((set) >> 1 & 1) + ((set) >> 2 & 1) + ((set) >> 3 & 1))
#if N == 3
#define ALL_OF(what) (what(0) && what(1) && what(2))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2))
#define EACH(what) what(0) what(1) what(2)
#else
#define ALL_OF(what) (what(0) && what(1) && what(2) && what(3))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2) + 8 * what(3))
#define EACH(what) what(0) what(1) what(2) what(3)
#endif

// --- what happens ---

byte gone;                      // who is dead or out
byte deaths, suspicions, cuts;  // that may still come; with more than 3 ranks of one kind only
byte side;                      // of a cut, the one without rank N - 1
byte troubles;                  // that there were

#define DEATH 1
#define SUSPICION 4
#define CUT 16

// --- messages ---

#define ARRIVED 1
#define VOTE 2
#define AGREED 3
#define MESSAGE(kind, call, wishes) \
  (members[me] << 14 | epoch[me] << 12 | (kind) << 10 | (call) << 8 | (wishes))
#define SET(message) ((message) >> 14)  // the members of its epoch
#define EPOCH(message) ((message) >> 12 & 3)
#define KIND(message) ((message) >> 10 & 3)
#define CALL_OF(message) ((message) >> 8 & 3)  // or the last that is over
#define WISHES(message) ((message) & 255)
#define PROVEN(message) ((message) & 15)
#define SILENT(message) ((message) >> 4 & 15)
#define LEAVES_OUT(message) (PROVEN(message) | SILENT(message))

int unheard[N * MOST_UNHEARD];    // by sender: what somebody has still to hear
byte sent[N];                     // how much that is
byte heard[N * N];                // by sender and receiver: how much of it
byte deaf[N];                     // by sender: who hears nothing of it any more, and itself

#define NEXT_OF(from, to) unheard[(from) * MOST_UNHEARD + heard[(from) * N + (to)]]
#define HAS_UNHEARD(from, to) (!HAS(deaf[from], to) && heard[(from) * N + (to)] < sent[from])

// --- a rank ---

byte epoch[N];
byte members[N];
byte committed[N];     // the last call that is over, from which it has returned
byte arrivals[N * N];  // by rank and other rank, itself too: at a call that is not over
short votes[N * N];    // likewise; call and wishes
byte known[N];         // members that have ended, as long as it has calls to make
bool settles[N];       // it has not arrived in this epoch, and will not
byte with[N * C];      // by rank and call: the members with which it has returned

#define CALL (committed[me] + 1)
#define OWN_ARRIVAL arrivals[me * N + me]
#define OWN_VOTE votes[me * N + me]
#define WITH(m, call) with[(m) * C + (call) - 1]

#define IS_HERE (!HAS(gone, me))
#define IS_IN_CALL (IS_HERE && committed[me] < C)
#ifdef EXACT_CALL
#define HAS_ARRIVED(m) (arrivals[me * N + (m)] == CALL)
#else
#define HAS_ARRIVED(m) (arrivals[me * N + (m)] >= CALL)
#endif
#define LACKS_VOTE(m)                                                  \
  (OWN_VOTE != 0 && (m) != me && !HAS(LEAVES_OUT(OWN_VOTE), m) &&      \
   WISHES(votes[me * N + (m)]) != WISHES(OWN_VOTE))
#ifdef STAYS_SILENT
#define LACKS_PROOF(m) false
#else
#define LACKS_PROOF(m) (OWN_VOTE != 0 && HAS(LEAVES_OUT(OWN_VOTE) & ~PROVEN(OWN_VOTE), m))
#endif
#define IS_AWAITED(m) (!HAS_ARRIVED(m) || LACKS_VOTE(m) || LACKS_PROOF(m))
#ifdef ARRIVED_STAY
#define IS_TO_GO(m) (settles[me] || !HAS_ARRIVED(m))
#else
#define IS_TO_GO(m) (settles[me] || IS_AWAITED(m))
#endif
#define IS_BEYOND(m) (HAS(side, m) != HAS(side, me))
#define IS_CUT_OFF(m) (HAS(members[me] & ~known[me], m) && IS_BEYOND(m))

#define IS_ENDED(m) (HAS(members[me] & known[me], m) && IS_TO_GO(m))
#define IS_SILENT(m) (IS_CUT_OFF(m) && IS_AWAITED(m))
#define NEW_ENDED (SET_OF(IS_ENDED) & ~PROVEN(OWN_VOTE))
#define NEW_SILENT (SET_OF(IS_SILENT) & ~LEAVES_OUT(OWN_VOTE))

// Used within a step.
hidden byte i, k, n, m, last;
hidden byte silent_ones, proven_ones, stay;
hidden byte is_over;
hidden int message;
hidden short before;

// --- what is checked ---

#define RETURNS_WITHOUT(a, b) (WITH(a, n) != 0 && !HAS(WITH(a, n), b))
// Others than `a` have made its last call again.
#define IS_LEFT_BEHIND(a, b)                                           \
  (n == committed[a] && HAS(WITH(a, n), b) && RETURNS_WITHOUT(b, a) && !HAS(members[b], a))
#define IS_SAME(a, b)                                                  \
  (WITH(a, n) == 0 || WITH(b, n) == 0 || WITH(a, n) == WITH(b, n) ||   \
   IS_LEFT_BEHIND(a, b) || IS_LEFT_BEHIND(b, a))
#define ARE_TOGETHER(a, b) (HAS(members[a], b) && HAS(members[b], a))

// This rank, once its members change or it has returned from a call, with all others.
inline compare() {
  for (m : 0 .. N - 1) {
    if
    :: m != me && !HAS(gone, m) ->
       assert(!ARE_TOGETHER(m, me) || epoch[m] != epoch[me] || members[m] == members[me]);
       k = 0;
       for (n : 1 .. C) {
         assert(IS_SAME(m, me));
         k = k | RETURNS_WITHOUT(m, me) | 2 * RETURNS_WITHOUT(me, m)
       };
       assert(k != 3)
    :: else
    fi
  }
}

// --- what is sent ---

// To all others.
inline say(what) {
  if
  :: deaf[me] != EVERY_RANK ->
     assert(sent[me] < MOST_UNHEARD);
     unheard[me * MOST_UNHEARD + sent[me]] = what;
     sent[me]++
  :: else
  fi
}

// What has been heard by all, too, is forgotten.
inline forget_heard(from) {
  k = sent[from];
  for (i : 0 .. N - 1) {
    heard[from * N + i] = (HAS(deaf[from], i) -> 0 : heard[from * N + i]);
    k = (!HAS(deaf[from], i) && heard[from * N + i] < k -> heard[from * N + i] : k)
  };
  for (i : 0 .. MOST_UNHEARD - 1) {
    unheard[from * MOST_UNHEARD + i] =
      (i + k < sent[from] -> unheard[from * MOST_UNHEARD + (i + k) % MOST_UNHEARD] : 0)
  };
  sent[from] = sent[from] - k;
  for (i : 0 .. N - 1) {
    heard[from * N + i] = (HAS(deaf[from], i) -> 0 : heard[from * N + i] - k)
  }
}

// Who has other members than its sender hears nothing of a message but members.
#ifdef ARRIVES_IN_NO_EPOCH
#define IS_AMONG(m) \
  (KIND(message) == ARRIVED || EPOCH(message) == epoch[m] && SET(message) == members[m])
#else
#define IS_AMONG(m) (EPOCH(message) == epoch[m] && SET(message) == members[m])
#endif
#define NEEDS_VOTE(message, from, to) \
  (!HAS(LEAVES_OUT(message), to) && !HAS(LEAVES_OUT(votes[(to) * N + (to)]), from))
#define TELLS_END(to) (committed[to] < C && (PROVEN(message) & ~known[to]) != 0)
#define CHANGES_NOTHING(from, to)                                                                      \
  (EPOCH(message) < epoch[to] && (KIND(message) != ARRIVED || !IS_AMONG(to)) ||                        \
   EPOCH(message) == epoch[to] &&                                                                      \
     (KIND(message) == AGREED && HAS(SET(message), to) ||                                              \
      KIND(message) != AGREED && !IS_AMONG(to) ||                                                      \
      KIND(message) == ARRIVED && CALL_OF(message) <= committed[to] ||                                 \
      KIND(message) == VOTE && !TELLS_END(to) && !NEEDS_VOTE(message, from, to)))
inline pass_over(from, to) {
  for (k : 1 .. sent[from]) {
    message = (HAS_UNHEARD(from, to) -> NEXT_OF(from, to) : 0);
    heard[from * N + to] = heard[from * N + to] + (message != 0 && CHANGES_NOTHING(from, to))
  }
}

// The end of each step of a rank.
inline tidy() {
  for (m : 0 .. N - 1) {
    pass_over(m, me);
    pass_over(me, m)
  };
  for (m : 0 .. N - 1) {
    forget_heard(m)
  };
  m = 0
}

// --- the agreement ---

inline know(set) {
  known[me] = (committed[me] < C -> (known[me] | set) & members[me] : 0)
}

inline end_call() {
  WITH(me, CALL) = members[me];
  committed[me]++;
  know(0);
  for (i : 0 .. N - 1) {
    arrivals[me * N + i] = (arrivals[me * N + i] > committed[me] -> arrivals[me * N + i] : 0)
  };
  compare()
}

// Whether the call is over for this rank.
inline count() {
  is_over = HAS_ARRIVED(me);
#ifndef COUNTS_AFTER_VOTE
  is_over = is_over && OWN_VOTE == 0;
#endif
  for (i : 0 .. N - 1) {
    is_over = is_over && (!HAS(members[me], i) || HAS_ARRIVED(i))
  };
  if
  :: is_over -> end_call()
  :: else
  fi
}

// Members and the last call that is over for one of them.
inline take(next_epoch, next_members, next_committed) {
  assert(next_committed == committed[me] || next_committed == CALL && HAS_ARRIVED(me));
  if
  :: next_committed == CALL -> end_call()
  :: else
  fi;
  members[me] = next_members;
  epoch[me] = next_epoch;
  settles[me] = false;
  know(0);
  for (i : 0 .. N - 1) {
    votes[me * N + i] = 0;
#ifdef ARRIVES_IN_NO_EPOCH
    arrivals[me * N + i] = (i != me && arrivals[me * N + i] > committed[me] -> arrivals[me * N + i] : 0)
#else
    arrivals[me * N + i] = 0
#endif
  };
  compare()
}

#define SAY_MEMBERS say(MESSAGE(AGREED, committed[me], 0))

// For these, and for all that it has voted for before.
inline cast(more_silent, more_proven) {
  before = OWN_VOTE;
  proven_ones = PROVEN(before) | more_proven;
  silent_ones = (SILENT(before) | more_silent) & ~proven_ones;
  OWN_VOTE = (before != 0 -> CALL_OF(before) : committed[me]) << 8 | silent_ones << 4 | proven_ones;
  stay = members[me] & ~(silent_ones | proven_ones);
#ifdef NO_MAJORITY
  is_over = true;
#else
  is_over = (members[me] & silent_ones) == 0 || 2 * SIZE(stay) > SIZE(members[me]);
#endif
  last = committed[me];
  for (i : 0 .. N - 1) {
    if
    :: HAS(stay, i) ->
#ifdef ANY_VOTES
       is_over = is_over && votes[me * N + i] != 0;
#else
       is_over = is_over && WISHES(votes[me * N + i]) == WISHES(OWN_VOTE);
#endif
#ifndef FORGETS_COMMITTED
       last = (CALL_OF(votes[me * N + i]) > last -> CALL_OF(votes[me * N + i]) : last)
#endif
    :: else
    fi
  };
  if
  :: is_over -> take(epoch[me] + 1, stay, last); SAY_MEMBERS
  :: !is_over && WISHES(OWN_VOTE) != WISHES(before) ->
     say(MESSAGE(VOTE, CALL_OF(OWN_VOTE), WISHES(OWN_VOTE)))
  :: else
  fi
}

// Dies, or is out.
inline go(who) {
  gone = gone | BIT(who);
  epoch[who] = 0;
  members[who] = 0;
  committed[who] = 0;
  known[who] = 0;
  settles[who] = false;
  for (n : 1 .. C) {
    WITH(who, n) = 0
  };
  for (m : 0 .. N - 1) {
    arrivals[who * N + m] = 0;
    votes[who * N + m] = 0;
    deaf[m] = deaf[m] | BIT(who);
    forget_heard(m)
  };
  m = 0
}

#ifdef TAKES_FROM_THE_LEFT_OUT
#define TAKES_FROM(m) true
#else
#define TAKES_FROM(m) (!HAS(LEAVES_OUT(OWN_VOTE), m))
#endif
#define IS_OUT_BY(agreed)                                                   \
  (!HAS(SET(agreed), me) && EPOCH(agreed) >= epoch[me] &&                   \
   (EPOCH(agreed) > epoch[me] || SET(agreed) != members[me]))
#define IS_NEXT(agreed) (HAS(SET(agreed), me) && EPOCH(agreed) > epoch[me])

inline hear(from) {
  message = NEXT_OF(from, me);
  heard[from * N + me]++;
  if
  :: KIND(message) == ARRIVED && IS_AMONG(me) ->
     arrivals[me * N + from] = (CALL_OF(message) > committed[me] -> CALL_OF(message) : 0);
     count()
  :: KIND(message) == VOTE && IS_AMONG(me) ->
     know(PROVEN(message));
     if
     :: NEEDS_VOTE(message, from, me) ->
        votes[me * N + from] = message & 1023;
#ifdef KEEPS_ITS_FIRST
        message = (OWN_VOTE != 0 -> OWN_VOTE : message);
#endif
        cast(SILENT(message), PROVEN(message))
     :: else
     fi
  :: KIND(message) == AGREED && IS_OUT_BY(message) -> go(me)
  :: KIND(message) == AGREED && IS_NEXT(message) && TAKES_FROM(from) ->
     take(EPOCH(message), SET(message), CALL_OF(message));
#ifndef ONLY_DECIDERS_TELL
     SAY_MEMBERS
#endif
  :: else
  fi
}

// --- what a rank does ---

#define ABOUT(m)                                                                                   \
  :: d_step { IS_HERE && HAS_UNHEARD(m, me) -> hear(m); tidy() }                                   \
  :: d_step {  /* its process has ended */                                                         \
       IS_IN_CALL && HAS(gone & members[me] & ~known[me], m) && !IS_BEYOND(m) ->                   \
       know(BIT(m));                                                                               \
       tidy()                                                                                      \
     }                                                                                             \
  :: d_step {  /* the connection has */                                                            \
       IS_HERE && HAS(gone, m) && HAS_UNHEARD(m, me) ->                                            \
       know(BIT(m));                                                                               \
       heard[(m) * N + me] = sent[m];                                                              \
       tidy()                                                                                      \
     }                                                                                             \
  :: d_step {                                                                                      \
       IS_HERE && suspicions > 0 && (m) != me && HAS(members[me] & ~gone, m) ->                    \
       suspicions--;                                                                               \
       troubles = troubles + SUSPICION;                                                            \
       cast(BIT(m), 0);                                                                            \
       tidy()                                                                                      \
     }

proctype rank(byte me) {
end_of_calls:
  do
  :: d_step {
       IS_IN_CALL && OWN_ARRIVAL == 0 && !settles[me] ->
       for (m : 0 .. N - 1) {
         assert(HAS(gone, m) || !ARE_TOGETHER(m, me) || WITH(m, CALL) == 0)
       };
       OWN_ARRIVAL = CALL;
       say(MESSAGE(ARRIVED, CALL, 0));
       count();
       tidy()
     }
  :: d_step {
       IS_IN_CALL && OWN_ARRIVAL == 0 && !settles[me] &&
       (known[me] != 0 || SET_OF(IS_SILENT) != 0 || OWN_VOTE != 0) ->
       settles[me] = true
     }
  :: d_step {
       IS_IN_CALL && (OWN_ARRIVAL != 0 || settles[me]) && (NEW_ENDED | NEW_SILENT) != 0 ->
       m = NEW_SILENT;
       n = NEW_ENDED;
       cast(m, n);
       tidy()
     }
  EACH(ABOUT)
  od
}

// --- what happens to ranks ---

#define IS_LAST (SIZE(gone) == N - 1 && troubles < CUT)
#define IS_EXCUSED (troubles > DEATHS && troubles != SUSPICION && troubles != CUT && !IS_LAST)
#define SIDE_OF(m) (HAS(side, m) -> side : EVERY_RANK & ~side)
#define IS_WITH_FEW(m) (2 * SIZE(SIDE_OF(m)) <= N)
#define IS_THROUGH(m) (HAS(gone, m) || committed[m] == C || IS_EXCUSED || IS_WITH_FEW(m))

#define BEYOND(set, m) (HAS(set, m) -> EVERY_RANK & ~(set) : (set))
#define CUT_OFF(set)                                  \
  :: d_step {                                         \
       cuts > 0 ->                                    \
       cuts--;                                        \
       troubles = troubles + CUT;                     \
       side = set;                                    \
       for (m : 0 .. N - 1) {                         \
         deaf[m] = deaf[m] | BEYOND(set, m);          \
         forget_heard(m)                              \
       };                                             \
       m = 0                                          \
     }

proctype fate() {
  byte victim;
  do
  :: d_step {
       deaths > 0 && !HAS(gone, victim) ->
       deaths--;
       troubles = troubles + DEATH;
       go(victim);
       victim++
     }
  CUT_OFF(1)
  CUT_OFF(2)
  CUT_OFF(3)
#if N > 3
  CUT_OFF(4)
  CUT_OFF(5)
  CUT_OFF(6)
  CUT_OFF(7)
#endif
  :: d_step { deaths = 0; suspicions = 0; cuts = 0; victim = 0 } -> break
  od;
  ALL_OF(IS_THROUGH)
}

init {
  atomic {
    byte r;
    deaths = DEATHS;
    suspicions = SUSPICIONS;
    cuts = CUTS;
#if N > 3
    if
    :: suspicions = 0; cuts = 0
    :: deaths = 0; cuts = 0
    :: deaths = 0; suspicions = 0
    fi;
#endif
    for (r : 0 .. N - 1) {
      members[r] = EVERY_RANK;
      deaf[r] = BIT(r);
      run rank(r)
    };
    r = 0;
    run fate()
  }
}
