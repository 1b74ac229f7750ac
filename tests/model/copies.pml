// SPDX-License-Identifier: Apache-2.0
// Calls by copy engines on GPUs (src/cuda/copy_engines/copies.cpp, call.cuh, dispatch.cu,
// combine.cu): a kernel packs and sends the handshake, copy engines carry the rows to one of two
// areas in turn, the stream raises a number of its own behind them, and a second kernel waits for
// the handshakes and the numbers that they name. Other calls lie between.
//
// Checked: who takes rows that were copied gets those of this call, also while a rank is late or
// refuses calls, which then have no number; nothing is copied over what is still read; every wait
// ends.
//
// The host numbers copies when it queues a call; a call that it refuses has none, so that the
// numbers of two ranks differ. Copies of a call that is given up run all the same, with what an
// earlier call has packed, and those of a rank that has broken off go to areas that a late peer may
// still read: whoever has taken rows looks once more whether that has begun. Abstracted: see gpu.pml.
//
// Mutations, each of which makes the check fail:
//   ONE_COPY_AREA          rows are copied to one area instead of two
//   ONE_WORD_AREA          words have one place instead of two
//   NO_FENCE               the number is raised before the copies are visible
//   NO_WORD_WAIT           the second kernel does not wait for all words
//   NO_WAIT_WHEN_GIVEN_UP  a call that is given up does not wait for the words
//   NO_COPY_WAIT           the second kernel does not wait for the numbers
//   OWN_NUMBER             a rank waits for its own number of copies instead of the peer's
//   OWN_AREA               a rank looks into the area that it copies to itself
//   WORD_BEFORE_END        a rank's word of the next call is sent before it has read its rows
//   NEVER_SILENT           all calls queued behind one that was broken off are refused by a word
//   NO_LAST_LOOK           rows are taken without a look whether their area is copied to again
#define NUM_KINDS 4
#define FIRST_ROW_KIND 2
#define FIRST_LOOSE_KIND 4
#define NUM_SIGNALS 4
#include "gpu.pml"

#ifdef ONE_COPY_AREA
#define ROW(number, owner, writer) CELL(2, owner, writer)
#else
#define ROW(number, owner, writer) CELL(2 + (number) % 2, owner, writer)
#endif
#define COPIED_SIGNAL(owner, writer) SIGNAL(2, owner, writer)
#define COPYING_SIGNAL(owner, writer) SIGNAL(3, owner, writer)
#define COPY 0
#define OTHER 1
bit op[C + 1];  // of each call

#define STALE 64  // added to what was not packed for this call
// What a peer's word says of its copies.
#define NUMBER_OF(peer) (visible[WORD(e, me, peer)] % REFUSED / 8)
#ifdef OWN_NUMBER
#define WANTED(peer) number
#else
#define WANTED(peer) told[peer]
#endif
#ifdef OWN_AREA
#define AREA_OF(peer) number
#else
#define AREA_OF(peer) told[peer]
#endif
#ifdef NO_COPY_WAIT
#define HAS_COPIES(peer) true
#else
#define HAS_COPIES(peer) ((peer) == me || COPIED_SIGNAL(me, peer) >= WANTED(peer))
#endif

#ifdef NO_LAST_LOOK
#define IS_LATE(peer) false
#else
#define IS_LATE(peer) ((peer) != me && COPYING_SIGNAL(me, peer) >= told[peer] + 2)
#endif

// finish_receive(): the rows have been taken, as long ago as that may be.
inline look_again() {
  d_step {
    if
    :: has_taken && ANY_OF(IS_LATE) -> BREAK_OFF
    :: has_taken && !ANY_OF(IS_LATE) -> assert(is_right); IS_RIGHT
    :: else
    fi;
    has_taken = false;
    is_right = false;
    FOR_PEERS(told[peer] = 0)
  }
}

proctype rank(byte me) RUNS {
  RANK_STATE;
  byte number;    // of this rank's copies
  byte told[N];   // the numbers that the peers' words of this call name
  bool has_taken; // rows that peers have copied
  bool is_right;  // they were those of this call
  bool is_copied; // the call is queued as one by copy engines
  {
    do
    :: e == C || stopped[me] == BROKEN -> break
    :: e < C ->
       atomic {
         begin_call();
         is_copied = op[e] == COPY && refuser[e] != me;
         number = number + is_copied;
         store_words(number)
       };
       if
       :: !has_told -> raise_words()
       :: else
       fi;
       if
       :: is_copied ->
          atomic {
            FOR_PEERS(COPYING_SIGNAL(peer, me) = number);
            said = (is_good -> number : STALE);
            FOR_PEERS(store(ROW(number, peer, me), said));
            said = 0
          };
          d_step {
            FENCE(ROWS, me) -> FOR_PEERS(COPIED_SIGNAL(peer, me) = number)
          }
       :: else
       fi;
       atomic {
         accept_words();
         FOR_PEERS(told[peer] = NUMBER_OF(peer))
       };
       send_next_words(number + (op[e] == COPY -> 1 : 0));
       if
       :: op[e] == COPY ->
          TAKE(
            ALL_OF(HAS_COPIES),
            has_taken = true;
            is_right = true;
            FOR_PEERS(is_right = is_right && visible[ROW(AREA_OF(peer), me, peer)] == told[peer])
          )
       :: else -> TAKE(true, IS_RIGHT)
       fi;
       look_again();
       is_copied = false;
       end_call()
    od
  } unless { is_dead && me == VICTIM };
  has_ended[me] = true
}

init {
  atomic {
    byte i;
    for (i : 1 .. C) {
      if
      :: op[i] = COPY
      :: op[i] = OTHER
      fi
    };
    START
  }
}
