// SPDX-License-Identifier: Apache-2.0
// The calls of the CPU executor: handshake (src/cpu/protocol/call_board.cpp), records of a plan
// (src/cpu/plan/call.cpp), rows of a dispatch or sums of a combine, direct or staged
// (src/cpu/dispatch, src/cpu/combine/reduce.hpp, sum.hpp, src/cpu/chunk_work.hpp), and a combine whose
// token ranks read the experts' rows where they are (rows.hpp). How waits end is in waiter.cpp.
//
// Checked: who takes a word, records or rows gets those of this call; nothing is written or changed
// that is still read; no rank writes for a call, or gets a result of one, that another refuses;
// an error names a rank that is dead, has failed or has not made the call; every wait ends.
//
// The wire promises what src/transport/transport.hpp does: a put's bytes are there before its signal
// grows, by one; nothing is said about other puts, so that any put may overtake any other. What a
// rank sent before it left arrives before it is seen to have left. What a dead rank sent arrives or
// does not. A chunk is two puts that share a signal. An output that its sources write themselves
// (direct) is read by the caller until it makes the next call; staging is read within the call.
// Left out: domains and forwarders, chunks of a pair, threads of a rank, memory that is released,
// parking (parking.pml).
//
// Mutations, each of which makes the check fail:
//   ONE_WORD_AREA      words have one place instead of two
//   ONE_WORD_SIGNAL    words of both parities raise the same signal
//   RECORDS_EARLY      records are sent before the words of all ranks have come
//   REFUSAL_UNHEARD    a rank that refuses does not wait for the others' words
//   SIGNAL_FIRST       a put's signal grows before its bytes are there
//   NOT_SETTLED        a call does not count what earlier calls have raised
//   ONE_PUT_SHORT      a chunk is taken when its first put has come
//   NO_READER_WAIT     a rank does not wait until its rows have been read
//   LEFT_FIRST         a rank is seen to have left before its last puts are there
//   NO_SECOND_LOOK     a rank that has left is blamed without another look at its signal
#ifndef NIGHT
#define ONE_AT_A_TIME
#endif
#include "ranks.pml"

// Kinds of puts; the last one is only a raise.
#define RECORDS 2
#define ROW_1 3
#define ROW_2 4
#define ROWS_READ 5
#define NUM_KINDS 6
#define NUM_CELLS (NUM_KINDS * N * N)
byte sent[NUM_CELLS];    // what is on its way; 0: nothing
byte num_sent[N];        // by writer
byte memory[NUM_CELLS];  // words, records, staging
byte output[NUM_CELLS];  // ROW_1 and ROW_2 where they are written directly
bool is_raised[NUM_CELLS];  // of SIGNAL_FIRST: the bytes are still on their way
byte signal[NUM_CELLS];
byte own_rows[N];        // for whom reads them: the call that they belong to

#define REFUSED 64  // added to what a word says
#define DIRECT 128  // likewise, and to a row on its way there
#define CALL(said) ((said) % REFUSED)
#ifdef ONE_WORD_AREA
#define WORD_AREA(e) 0
#else
#define WORD_AREA(e) ((e) % 2)
#endif
#define WORD(e, owner, writer) memory[CELL(WORD_AREA(e), owner, writer)]
#ifdef ONE_WORD_SIGNAL
#define SIGNAL_KIND(kind) ((kind) < 2 -> 0 : ((kind) == ROW_2 -> ROW_1 : (kind)))
#define WORDS_SO_FAR(e) (e)
#else
#define SIGNAL_KIND(kind) ((kind) == ROW_2 -> ROW_1 : (kind))
#define WORDS_SO_FAR(e) (((e) + 1) / 2)
#endif
#define SIGNAL_OF(cell) signal[CELL(SIGNAL_KIND((cell) / (N * N)), OWNER_OF(cell), WRITER_OF(cell))]
#define HAS_WORD(p) \
  ((p) == me || signal[CELL(SIGNAL_KIND(e % 2), me, p)] >= WORDS_SO_FAR(e))

// --- the wire ---

inline put(kind, value) {
  assert(sent[CELL(kind, peer, me)] == 0);
  num_sent[me]++;
  sent[CELL(kind, peer, me)] = value
}

#define LOSE(cell) sent[cell] = 0; num_sent[WRITER_OF(cell)]--
#define LAND(cell)                                                                     \
  if                                                                                   \
  :: (cell) >= ROW_1 * N * N && sent[cell] >= DIRECT -> output[cell] = sent[cell] - DIRECT \
  :: (cell) < 2 * N * N -> memory[CELL(WORD_AREA((cell) / (N * N)), OWNER_OF(cell), WRITER_OF(cell))] = sent[cell] \
  :: else -> memory[cell] = sent[cell]                                                 \
  fi;                                                                                  \
  LOSE(cell)
// The puts of a chunk are alike, so ROW_2 need not come before ROW_1.
#define IS_SENT(cell) \
  ((cell) < NUM_CELLS && WRITER_OF(cell) != OWNER_OF(cell) && sent[cell] != 0 && \
   ((cell) / (N * N) != ROW_2 || sent[(cell) - N * N] == 0))
#ifdef SIGNAL_FIRST
#define ARRIVE(cell)                                   \
  :: d_step { IS_SENT(cell) && !is_raised[cell] -> SIGNAL_OF(cell)++; is_raised[cell] = true } \
  :: d_step { IS_SENT(cell) && is_raised[cell] -> is_raised[cell] = false; LAND(cell) }
#else
#define ARRIVE(cell)                                                    \
  :: d_step { IS_SENT(cell) -> LAND(cell); SIGNAL_OF(cell)++ }          \
  :: d_step { IS_SENT(cell) && WRITER_OF(cell) == VICTIM && is_dead -> LOSE(cell) }
#endif
#define ARRIVE_8(cell) \
  ARRIVE(cell) ARRIVE((cell) + 1) ARRIVE((cell) + 2) ARRIVE((cell) + 3) \
  ARRIVE((cell) + 4) ARRIVE((cell) + 5) ARRIVE((cell) + 6) ARRIVE((cell) + 7)

proctype carrier() {
end:
  do
  ARRIVE_8(0) ARRIVE_8(8) ARRIVE_8(16)
#if N > 2
  ARRIVE_8(24) ARRIVE_8(32) ARRIVE_8(40) ARRIVE_8(48)
#endif
  od
}

// --- a rank ---

#define PLAN 0
#define DISPATCH 1
#define COMBINE 2  // by ranks that read the rows
byte op[C + 1];    // of each call
bool is_broken[N];
bool has_left[N];
byte num_done[N];  // calls
bool is_writing[C + 1];  // some rank has sent more than words for the call

#define IS_GONE(p) ((p) != me && (has_left[p] || (is_dead && (p) == VICTIM)))
#define IS_SILENT(p) (is_broken[p] || has_ended[p])
#define MAY_EXPIRE (is_halted || is_dead || ANY_OF(IS_SILENT))
#define IS_TO_BLAME(p) (is_broken[p] || num_done[p] < e || (is_dead && (p) == VICTIM))

// Waits for has(p) of all ranks. If that ends without them, the rank breaks off.
#define BREAK_OFF    \
  is_good = false;   \
  is_broken[me] = true
#define BLAME(p)            \
  d_step {                  \
    assert(IS_TO_BLAME(p)); \
    BREAK_OFF               \
  }
#ifdef NO_SECOND_LOOK
#define LOOK(has, p)              \
  :: !has(p) ->                   \
     if                           \
     :: IS_GONE(p) -> BLAME(p); break \
     :: !IS_GONE(p)               \
     fi
#else
#define LOOK(has, p) :: !has(p) && IS_GONE(p) -> BLAME(p); break
#endif
#if N == 2
#define LOOKS(has) LOOK(has, 0) LOOK(has, 1)
#else
#define LOOKS(has) LOOK(has, 0) LOOK(has, 1) LOOK(has, 2)
#endif
#define AWAIT(has)                 \
  do                               \
  :: ALL_OF(has) -> break          \
  LOOKS(has)                       \
  :: !ALL_OF(has) && MAY_EXPIRE -> \
     d_step { BREAK_OFF };         \
     break                         \
  od;                              \
  skip

// By how much each signal of this rank has grown in the calls before.
#ifdef NOT_SETTLED
#define SETTLED(count) 0
#else
#define SETTLED(count) (count)
#endif
#ifdef ONE_PUT_SHORT
#define PUTS 1
#else
#define PUTS 2
#endif
#define HAS_RECORDS(p) \
  ((p) == me || signal[CELL(RECORDS, me, p)] >= SETTLED(num_plans) + 1)
#define HAS_ROWS(p) \
  ((p) == me || signal[CELL(ROW_1, me, p)] >= SETTLED(2 * num_dispatches) + PUTS)
#define HAS_READ(p) \
  ((p) == me || signal[CELL(ROWS_READ, me, p)] >= SETTLED(num_combines) + 1)

#define WRITES                  \
  assert(refuser[e] == NOBODY); \
  is_writing[e] = true
#define PUT_RECORDS           \
  d_step {                    \
    WRITES;                   \
    FOR_PEERS(put(RECORDS, e)) \
  }
#ifdef RECORDS_EARLY
#define SEND_EARLY                              \
  if                                            \
  :: op[e] == PLAN && is_good -> PUT_RECORDS    \
  :: else                                       \
  fi
#define SEND_RECORDS skip
#else
#define SEND_EARLY skip
#define SEND_RECORDS PUT_RECORDS
#endif
#ifdef REFUSAL_UNHEARD
#define HEARS is_good
#else
#define HEARS true
#endif
#ifdef LEFT_FIRST
#define MAY_LEAVE true
#else
#define MAY_LEAVE (num_sent[me] == 0)
#endif

inline take_words() {
  d_step {
    FOR_PEERS(
      said = WORD(e, me, peer);
      assert(CALL(said) == e);
      if
      :: said & REFUSED -> is_good = false
      :: else
      fi
    );
    said = 0
  }
}

inline send_rows() {
  d_step {
    WRITES;
    FOR_PEERS(
      said = e + (WORD(e, me, peer) & DIRECT);
      put(ROW_1, said);
      put(ROW_2, said)
    );
    said = 0
  }
}

#define ROWS_LIE_IN(area) \
  FOR_PEERS(assert(area[CELL(ROW_1, me, peer)] == e && area[CELL(ROW_2, me, peer)] == e))

proctype rank(byte me) RUNS {
  byte e;
  byte peer;
  byte said;
  byte num_plans;
  byte num_dispatches;
  byte num_combines;
  bool is_good;
  bool is_direct;
  bool has_rows;  // in its output, from the call before
  {
    do
    :: is_broken[me] -> break
    :: !is_broken[me] && (e == C || me == VICTIM) -> break
    :: !is_broken[me] && e < C ->
       atomic {
         d_step {
           if  // the caller uses the output as late as it may
           :: has_rows -> ROWS_LIE_IN(output)
           :: else
           fi;
           has_rows = false;
           e++;
           own_rows[me] = e;
           is_good = true
         };
         is_direct = op[e] == DISPATCH;
         if
         :: is_direct && me == VICTIM -> is_direct = false
         :: true
         fi;
         if
         :: MAY_REFUSE -> num_refusals++; refuser[e] = me; is_good = false; assert(!is_writing[e])
         :: true
         fi;
         d_step {
           said = e + (is_direct -> DIRECT : 0) + (is_good -> 0 : REFUSED);
           FOR_PEERS(put(e % 2, said));
           said = 0
         }
       };
       SEND_EARLY;
       if
       :: HEARS ->
          AWAIT(HAS_WORD);
          if
          :: !is_broken[me] -> take_words()
          :: is_broken[me]
          fi
       :: !HEARS
       fi;
       if
       :: !is_good
       :: is_good && op[e] == PLAN ->
          SEND_RECORDS;
          AWAIT(HAS_RECORDS);
          d_step {
            if
            :: is_good -> FOR_PEERS(assert(memory[CELL(RECORDS, me, peer)] == e))
            :: else
            fi;
            num_plans++
          }
       :: is_good && op[e] == DISPATCH ->
          send_rows();
          AWAIT(HAS_ROWS);
          d_step {
            if
            :: is_good && !is_direct -> ROWS_LIE_IN(memory)
            :: else
            fi;
            has_rows = is_good && is_direct;
            num_dispatches++
          }
       :: is_good && op[e] == COMBINE ->
          d_step {
            WRITES;
            FOR_PEERS(
              assert(own_rows[peer] == e || is_broken[peer]);
              put(ROWS_READ, e)
            )
          };
#ifndef NO_READER_WAIT
          AWAIT(HAS_READ);
#endif
          num_combines++
       fi;
       d_step {
         own_rows[me] = 0;
         is_direct = false;
         is_good = false;
         if
         :: is_broken[me]
         :: else -> num_done[me] = e
         fi
       }
    od
  } unless { is_dead && me == VICTIM };
  // It closes its exchange, or keeps it and calls no more.
  if
  :: has_ended[me] = true
  :: MAY_LEAVE && !(is_dead && me == VICTIM) -> has_left[me] = true
  fi
}

init {
  atomic {
    byte i;
    for (i : 1 .. C) {
      if
      :: op[i] = PLAN
      :: op[i] = DISPATCH
      :: op[i] = COMBINE
      fi
    };
    START
  }
}
