// SPDX-License-Identifier: Apache-2.0
// How a new process takes a lost rank's place on GPUs (src/cuda/exchange/loss_watch.hpp, readmit and
// rejoin of CudaExchange). All ranks but rank 0 are members and make the same calls; between two of
// them they call readmit, and a new process asks to be rank 0, before that or later or never.
//
// Checked: calls that are not void are made with the same members and by the same numbers on all
// ranks, on the new one too; no word that is older, of the process that had the place, or of a graph
// captured before is taken for one of a call, nor does one take such a word's place; a rank that is
// lost before all have come to readmit is heard of by all as in a call, and nobody takes what is said
// in a recovery for what is said to newcomers; readmit ends for all with the same members, whoever
// dies meanwhile; who has replayed a graph that knows old addresses hears of it; every rank that is
// left gets through, without help of any deadline but the one by which a new process has to ask.
//
// The ranks but rank 0 are alike, so the last is the one that dies, at any moment, also when its word
// has reached one rank alone, and the new process is the other, after it has asked or before. The time
// of rank 1 may be up at any moment, that of others once the new process is dead. The process that had
// the place lives at first, and stores at last what belongs to its last call. Rank 1 replays an old
// graph once.
//
// A call is what a rank's kernel and host do together; losses.pml has both apart, with calls that are
// queued and the thread that stops them. The change of members is one step (roll.pml has its steps).
// Of what ranks exchange when they meet there are the first round and the last. Left out: ranks that
// live and are given up, several places at once or one after the other, VMM (old graphs are then calls
// as any), memory behind the words.
//
// Mutations, each of which makes the check fail:
//   NO_ASSEMBLY            a rank does not wait until all have come to readmit
//   KEEPS_ARRIVED          who settles leaves a dead rank among the members that has come to readmit
//   LETS_IN_EARLY          the new process is let in while the last one in its place may still store
//   BEGINS_AT_ZERO         the new process counts calls from its own first
//   LAST_OF_ONE            members count on from their own last call, the new one from a member's
//   NEWCOMERS_ONCE         who has waited in vain takes nobody for new when the others wait longer
//   MEETS_ALONE            readmit is over for whoever has met all, others or not
//   MAIL_OF_ANY_TIME       what a rank has said among earlier members is heard again
//   OLD_GRAPH_SPEAKS       an old graph sends words by the numbers that it knows
//   OLD_GRAPH_COUNTS       an old graph's fault makes calls void
//   OLD_GRAPH_UNHEARD      a recovery clears an old graph's fault
#ifndef N
#define N 3  // ranks
#endif
#ifndef BEFORE
#define BEFORE 1  // calls before readmit
#endif
#ifndef C
#define C 3  // calls in all
#endif
#ifndef DEATHS
#define DEATHS 2
#endif

#define BIT(m) (1 << (m))
#define HAS_COME (1 << N)  // beside members: the new process is one of them, or was
#if N == 3
#define ALL_OF(what) (what(0) && what(1) && what(2))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2))
#else
#define ALL_OF(what) (what(0) && what(1) && what(2) && what(3))
#define SET_OF(what) (what(0) + 2 * what(1) + 4 * what(2) + 8 * what(3))
#endif
#define RANKS ((1 << N) - 1)
#define LAST_RANK (N - 1)

// --- what happens ---

bool is_dead[N];
byte deaths;           // that may still come
bool asks;             // the new process
bool is_old_one_here;  // the process that had the place has not ended
bool is_impatient;     // the time of rank 1 may be up

#define IS_DEAD(m) is_dead[m]
#define DEAD SET_OF(IS_DEAD)

// --- the agreement ---

byte epoch;  // how often the members have changed
byte members_of[8];
byte committed;   // changes and recoveries that are over for all, by their number
byte arrived[N];  // who has what it needs of one of them, and in which epoch
// What ranks say to each other, in two places by the parity of the round: the epoch.
byte mail[2 * N];
byte mail_last[N], mail_void[N];  // of the first round
bool is_mail_facts[N];            // and not of a recovery

#define ARRIVAL(epoch, change) ((epoch) * 16 + (change))
#define UNKNOWN 255

// --- a rank ---

byte ended[N];    // the number of the last call that has ended
byte members[N];  // without the lost ones
byte region[N];   // the epoch in which it has mapped rank 0's memory, or has made it
byte n[N];        // calls that were made and are not void
byte known[N];    // the epoch whose members it has taken on
bool is_through[N];  // readmit
byte with[N * (C + 1)];  // by rank and call: the members with which it has ended well
#define WITH(m, call) with[(m) * (C + 1) + (call)]

// Of rank 1:
bool has_old_graph;  // it was captured before, and not replayed
bool is_unheard;     // it was replayed, and its host knows nothing of it
bool has_old_fault;
byte old_number;  // the last of the graph, had it not been retired

// As in losses.pml; `said` is what comes with a word, too.
#define CELL(e, owner, writer) (((e) % 2) * N * N + (owner) * N + (writer))
#define SAY(call, members) ((call) + 8 * (members))
#define OLD 255
byte number[2 * N * N];
byte said[2 * N * N];
#define OLD_NUMBER 1    // of the last call of the process that had the place
#define FIRST_NUMBER 2  // where the others have gone on from

#define IS_MEMBER(m) (members[me] & BIT(m))
#define HAS_WORD(m) ((m) == me || !IS_MEMBER(m) || number[CELL(e, me, m)] >= e)
// Others have left what rank 0 had before, or have not mapped what it has now.
#define IS_REACHED(m) (!is_dead[m] && ((m) > 0 || region[me] == region[0]))
#define POST(peer)                                             \
  if                                                           \
  :: peer != me && IS_MEMBER(peer) && IS_REACHED(peer) ->      \
     number[CELL(e, peer, me)] = e;                            \
     said[CELL(e, peer, me)] = SAY(n[me] + 1, members[me])     \
  :: else                                                      \
  fi

#define KNOWN members_of[known[me]]
#define IS_IN_TROUBLE (epoch != known[me] || (KNOWN & DEAD))

inline forget_words(owner, i) {
  for (i : 0 .. N - 1) {
    number[CELL(0, owner, i)] = 0;
    number[CELL(1, owner, i)] = 0;
    said[CELL(0, owner, i)] = 0;
    said[CELL(1, owner, i)] = 0
  };
  i = 0
}

// What this rank has written to others, has posted and has come to stays.
inline die(who, i) {
  ended[who] = 0;
  members[who] = 0;
  region[who] = 0;
  n[who] = 0;
  known[who] = 0;
  is_through[who] = false;
  for (i : 0 .. C) {
    WITH(who, i) = 0
  };
  forget_words(who, i);
  is_dead[who] = true
}

// --- a change of the members, or a recovery ---

#define HAS_ARRIVED(m) (!(KNOWN & BIT(m)) || arrived[m] == ARRIVAL(known[me], change))
#define IS_LATE(m) ((KNOWN & BIT(m)) && is_dead[m] && !HAS_ARRIVED(m))
#define LATE SET_OF(IS_LATE)
#ifdef KEEPS_ARRIVED
#define GONE LATE
#else
#define GONE (KNOWN & DEAD)
#endif
#define PROPOSE(set)            \
  members_of[epoch + 1] = set;  \
  epoch++
#define ADOPT                         \
  known[me] = epoch;                  \
  assert(members_of[epoch] & BIT(me))
#define ARRIVE arrived[me] = ARRIVAL(known[me], change)
// All have arrived, or what is to be done otherwise.
#define FINISH(label)                                                            \
  do                                                                             \
  :: committed == change -> break                                                \
  :: d_step {                                                                    \
       epoch == known[me] && committed != change && ALL_OF(HAS_ARRIVED) ->       \
       committed = change                                                        \
     }                                                                           \
  :: d_step {                                                                    \
       epoch == known[me] && committed != change && LATE != 0 ->                 \
       PROPOSE(KNOWN & ~LATE)                                                    \
     }                                                                           \
  :: epoch != known[me] && committed != change -> goto label                     \
  od
// This rank has not arrived: the change cannot be over.
#define MAY_SETTLE (epoch != known[me] || GONE != 0)
#define SETTLE                                      \
  if                                                \
  :: epoch == known[me] -> PROPOSE(KNOWN & ~GONE)   \
  :: else                                           \
  fi;                                               \
  ADOPT

#ifdef MAIL_OF_ANY_TIME
#define IS_MAIL(m, round) (mail[2 * (m) + round] > 0)
#else
#define IS_MAIL(m, round) (mail[2 * (m) + round] == known[me])
#endif
#define HAS_MAIL_0(m) (!(KNOWN & BIT(m)) || IS_MAIL(m, 0))
#define HAS_MAIL_1(m) (!(KNOWN & BIT(m)) || IS_MAIL(m, 1))
#define IS_MISSING_0(m) ((KNOWN & BIT(m)) && is_dead[m] && !IS_MAIL(m, 0))
#define IS_MISSING_1(m) ((KNOWN & BIT(m)) && is_dead[m] && !IS_MAIL(m, 1))
#define TELL(is_facts, last, first_void) \
  mail[2 * me] = known[me];              \
  is_mail_facts[me] = is_facts;          \
  mail_last[me] = last;                  \
  mail_void[me] = first_void
#define FOR_MEMBERS(m, body)      \
  for (m : 0 .. N - 1) {          \
    if                            \
    :: KNOWN & BIT(m) -> body     \
    :: else                       \
    fi                            \
  };                              \
  m = 0
#define GO_ON                                                                        \
  for (m : 0 .. 2 * N * N - 1) {                                                     \
    if  /* no call will wait for it */                                               \
    :: m / N % N == me && number[m] <= all_last + 1 -> number[m] = 0; said[m] = 0    \
    :: else                                                                          \
    fi                                                                               \
  };                                                                                 \
  m = 0;                                                                             \
  ended[me] = all_last + 1;                                                          \
  members[me] = KNOWN & RANKS;                                                       \
  all_last = 0

#ifdef LETS_IN_EARLY
#define MAY_LET_IN true
#else
#define MAY_LET_IN (!is_old_one_here)
#endif

// Of calls that two members both have made.
#define COMPARE                                                           \
  FOR_MEMBERS(m,                                                          \
    if                                                                    \
    :: m != me && !is_dead[m] && known[m] == known[me] ->                 \
       for (call : (m == 0 || me == 0 -> BEFORE + 1 : 1) .. n[me]) {      \
         assert(n[m] >= call && WITH(m, call) == WITH(me, call))          \
       }                                                                  \
    :: else                                                               \
    fi);                                                                  \
  call = 0

proctype rank(byte me) {
  byte e;       // the number of the call
  byte change;  // the number of the change or recovery
  byte own_last, own_first_void;
  byte all_last, all_first_void;
  bool is_new;  // rank 0, for this one
  byte m;
  byte call;
  {
    if
    :: me > 0
    :: me == 0 -> goto join
    fi;
end_of_calls:
    do
    :: atomic {  // and dies between its words
         n[me] < C && (n[me] != BEFORE || is_through[me]) && me == LAST_RANK && deaths > 0 ->
         deaths--;
         e = ended[me] + 1;
         if
         :: m = 0
         :: m = 1
         fi;
         POST(m);
         m = 0;
         e = 0;
         die(me, m)
       }
    :: d_step {
         n[me] < C && (n[me] != BEFORE || is_through[me]) ->
         e = ended[me] + 1;
         for (m : 0 .. N - 1) {
           POST(m)
         };
         m = 0
       };
       if
       :: d_step {
            ALL_OF(HAS_WORD) ->
            n[me]++;
            for (m : 0 .. N - 1) {
              if
              :: m != me && IS_MEMBER(m) ->
                 assert(number[CELL(e, me, m)] == e);
                 assert(said[CELL(e, me, m)] == SAY(n[me], members[me]));
                 said[CELL(e, me, m)] = 0
              :: else
              fi
            };
            m = 0;
            WITH(me, n[me]) = members[me];
            ended[me] = e;
            e = 0
          }
       :: d_step { IS_IN_TROUBLE -> n[me]++; ended[me] = e; own_first_void = e; e = 0 };
          goto settle
       fi
    :: IS_IN_TROUBLE -> own_first_void = ended[me] + 1; goto settle
    :: n[me] == BEFORE && !is_through[me] && MAY_LET_IN -> goto readmit
    :: d_step {
         me == 1 && has_old_graph && is_through[1] && region[1] > 0 ->
         has_old_graph = false;
         is_unheard = true;
         has_old_fault = true;
#ifdef OLD_GRAPH_SPEAKS
         e = old_number + 1;
         for (m : 1 .. N - 1) {
           if
           :: m != me && !is_dead[m] ->
              number[CELL(e, m, me)] = e;
              said[CELL(e, m, me)] = OLD
           :: else
           fi
         };
         m = 0;
         e = 0
#endif
       }
    :: d_step { me == 1 && has_old_fault && !IS_IN_TROUBLE -> has_old_fault = false; is_unheard = false }
    :: me == 1 && is_unheard && !has_old_fault -> assert(false)
    od;

settle:
    atomic {
      change++;
      own_last = ended[me];
      if
#ifdef OLD_GRAPH_COUNTS
      :: me == 1 && has_old_fault -> own_first_void = 1
#endif
      :: else
      fi
    };
settle_again:
    atomic { MAY_SETTLE -> SETTLE };
tell_calls:
    atomic { TELL(false, own_last, own_first_void) };
    do
    :: ALL_OF(HAS_MAIL_0) -> break
    :: epoch != known[me] -> goto settle_again
    :: SET_OF(IS_MISSING_0) != 0 -> goto settle_again
    od;
    atomic {
      all_last = 0;
      all_first_void = 255;
      FOR_MEMBERS(m,
        assert(!is_mail_facts[m]);
        all_last = (mail_last[m] > all_last -> mail_last[m] : all_last);
        all_first_void = (mail_void[m] < all_first_void -> mail_void[m] : all_first_void));
      ARRIVE
    };
    FINISH(calls_again);
    atomic {
      assert(own_last + 1 >= all_first_void);
      assert(n[me] >= own_last + 1 - all_first_void);
      n[me] = n[me] - (own_last + 1 - all_first_void);
      assert(n[me] >= (is_through[me] -> BEFORE : 0));
      for (call : n[me] + 1 .. C) {
        WITH(me, call) = 0
      };
      COMPARE;
      GO_ON;
      all_first_void = 0;
      own_last = 0;
      own_first_void = 0;
#ifdef OLD_GRAPH_UNHEARD
      has_old_fault = (me == 1 -> false : has_old_fault)
#endif
    };
    goto end_of_calls;
calls_again:
    atomic { ADOPT };
    goto tell_calls;

join:
    asks = true;
end_of_waiting:
    atomic {
      members_of[epoch] & BIT(0) ->
      known[0] = epoch;
      change = committed + 1
    };
    goto meet;

readmit:
#ifndef NO_ASSEMBLY
    atomic {
      change++;
      ARRIVE
    };
    FINISH(lost_before);
#endif
    atomic {
      change++;
      own_last = 0;
      own_first_void = 0
    };
    do
    :: (KNOWN & HAS_COME) -> is_new = true; break
    :: d_step { epoch != known[me] -> m = KNOWN; ADOPT };
       if
       :: m == KNOWN -> m = 0; break  // called off
       :: else -> m = 0
       fi
    :: d_step {
         epoch == known[me] && !(KNOWN & HAS_COME) && asks && !is_dead[0] ->
         PROPOSE(KNOWN | HAS_COME | BIT(0))
       }
    :: d_step {
         epoch == known[me] && !(KNOWN & HAS_COME) && ((me == 1 && is_impatient) || is_dead[0]) ->
         PROPOSE(KNOWN)
       }
    od;
    goto meet;
meet_again:
    atomic { MAY_SETTLE -> SETTLE };
meet:
    atomic {
#ifndef NEWCOMERS_ONCE
      is_new = (KNOWN & HAS_COME) != 0;
#endif
      TELL(true, (me == 0 -> UNKNOWN : ended[me]), 0)
    };
    do
    :: ALL_OF(HAS_MAIL_0) -> break
    :: epoch != known[me] -> goto meet_again
    :: SET_OF(IS_MISSING_0) != 0 -> goto meet_again
    od;
    atomic {
      all_last = 0;
      FOR_MEMBERS(m,
        assert(is_mail_facts[m]);
#ifdef LAST_OF_ONE
        all_last = (mail_last[m] != UNKNOWN && all_last == 0 -> mail_last[m] : all_last)
#else
        all_last = (mail_last[m] != UNKNOWN && mail_last[m] > all_last -> mail_last[m] : all_last)
#endif
        );
#ifdef LAST_OF_ONE
      all_last = (me > 0 -> ended[me] : all_last);
#endif
#ifdef BEGINS_AT_ZERO
      all_last = (me == 0 -> 0 : all_last);
#endif
      if
      :: me == 0 -> forget_words(0, m)
      :: me == 1 -> old_number = (is_new && region[me] == 0 -> ended[me] : old_number)
      :: else
      fi;
      region[me] = (is_new || me == 0 -> known[me] : region[me]);
      GO_ON;
      mail[2 * me + 1] = known[me]
    };
    do
    :: ALL_OF(HAS_MAIL_1) -> break
    :: epoch != known[me] -> goto meet_again
    :: SET_OF(IS_MISSING_1) != 0 -> goto meet_again
    od;
#ifndef MEETS_ALONE
    ARRIVE;
    FINISH(met_in_vain);
#endif
    atomic {
      is_new = false;
      n[me] = BEFORE;
      is_through[me] = true
    };
    goto end_of_calls;
met_in_vain:
    atomic { ADOPT };
    goto meet;

lost_before:
    atomic {
      own_last = ended[me];
      own_first_void = own_last + 1;
      ADOPT
    };
    goto tell_calls
  } unless { is_dead[me] };
  d_step {
    e = 0;
    change = 0;
    own_last = 0;
    own_first_void = 0;
    all_last = 0;
    all_first_void = 0;
    is_new = false;
    m = 0;
    call = 0
  }
}

// Masked long ago: what it still stores belongs to its last call.
proctype old_one() {
  d_step {
    is_old_one_here = false;
    if
    :: !is_dead[1] ->
       number[CELL(OLD_NUMBER, 1, 0)] = OLD_NUMBER;
       said[CELL(OLD_NUMBER, 1, 0)] = OLD
    :: else
    fi
  }
}

proctype fate() {
  byte i;
  do
  :: d_step { deaths > 0 && !is_dead[0] -> deaths--; die(0, i) }
  :: d_step { deaths > 0 && !is_dead[LAST_RANK] -> deaths--; die(LAST_RANK, i) }
  :: deaths = 0 -> break
  od
}

init {
  atomic {
    byte i;
    members_of[0] = RANKS & ~BIT(0);
    is_old_one_here = true;
    has_old_graph = true;
    deaths = DEATHS;
    if
    :: is_impatient = true
    :: is_impatient = false
    fi;
    for (i : 0 .. N - 1) {
      if
      :: i > 0 -> ended[i] = FIRST_NUMBER; members[i] = RANKS & ~BIT(0)
      :: else
      fi;
      run rank(i)
    };
    i = 0;
    run old_one();
    run fate()
  }
}
