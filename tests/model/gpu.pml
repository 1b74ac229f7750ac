// SPDX-License-Identifier: Apache-2.0
// What the models of the GPU executor share: the memory of the ranks, what a late rank does to the
// others, and how a call begins, fails and ends (src/cuda/device/wait.cuh, call_setup.cuh,
// src/cuda/exchange/faults.cpp). dispatch.pml, eager.pml and copies.pml add the payload.
//
// Memory. What a rank stores at a peer lies in a cell: a word, a row, a record. A store makes its
// value pending; it becomes visible at any later moment, in any order among all cells, until the
// role of the kernel that stored it has passed its fence. A fence of the hardware orders stores and
// does not wait for them, but a peer, who knows only what has become visible, cannot tell the
// difference. A signal is raised behind a fence and is visible at once: one that comes late looks
// like a rank that is slow. A kernel ends when its stores are visible.
//
// Reads. What a role reads, it reads in one step, as late as it may: what was overwritten between
// two reads is overwritten then, too.
//
// Faults. The host may have queued the next call before it hears of a fault, or it hears of it
// first, and clears one that all ranks share.
//
// Left out: blocks and warps (inside of a GPU the memory model's own rows stand for themselves), a
// rank's part for itself, the bytes of a row, epochs that wrap.
#include "ranks.pml"

// --- memory ---

#define SIGNAL(kind, owner, writer) signal[CELL(kind, owner, writer)]
// Kinds 0 and 1 are handshakes, in a model with calls of two halves 2 and 3 those of the second.
// Each role of a kernel has a fence of its own.
#define WORDS 0
#define ROWS 1   // FIRST_ROW_KIND and what follows
#define LOOSE 2  // FIRST_LOOSE_KIND and what follows: stored without a fence
#define ROLE_OF(cell) \
  ((cell) < FIRST_ROW_KIND * N * N -> WORDS : ((cell) < FIRST_LOOSE_KIND * N * N -> ROWS : LOOSE))

#define NUM_CELLS (NUM_KINDS * N * N)
byte visible[NUM_CELLS];
byte pending[NUM_CELLS];  // 0: nothing
byte num_pending[3 * N];  // by role and writer
byte signal[NUM_SIGNALS * N * N];

#define IS_SHOWN(role, writer) (num_pending[(role) * N + (writer)] == 0)
#ifdef NO_FENCE
#define FENCE(role, writer) true
#else
#define FENCE(role, writer) IS_SHOWN(role, writer)
#endif

inline store(cell, value) {
  if
  :: pending[cell] == 0 -> num_pending[ROLE_OF(cell) * N + WRITER_OF(cell)]++
  :: else
  fi;
  pending[cell] = value
}

// What is pending becomes visible, or is lost with its writer.
#define IS_PENDING(cell) ((cell) < NUM_CELLS && WRITER_OF(cell) != OWNER_OF(cell) && pending[cell] != 0)
#define SHOW(cell)                                     \
  :: d_step {                                          \
       IS_PENDING(cell) ->                             \
       visible[cell] = pending[cell];                  \
       pending[cell] = 0;                              \
       num_pending[ROLE_OF(cell) * N + WRITER_OF(cell)]-- \
     }                                                 \
  :: d_step {                                          \
       IS_PENDING(cell) && WRITER_OF(cell) == VICTIM && is_dead -> \
       pending[cell] = 0;                              \
       num_pending[ROLE_OF(cell) * N + WRITER_OF(cell)]-- \
     }
#define SHOW_10(cell) \
  SHOW(cell) SHOW((cell) + 1) SHOW((cell) + 2) SHOW((cell) + 3) SHOW((cell) + 4) \
  SHOW((cell) + 5) SHOW((cell) + 6) SHOW((cell) + 7) SHOW((cell) + 8) SHOW((cell) + 9)

proctype carrier() {
end:
  do
  SHOW_10(0) SHOW_10(10) SHOW_10(20)
#if NUM_CELLS > 30
  SHOW_10(30) SHOW_10(40) SHOW_10(50)
#endif
#if NUM_CELLS > 60
#error "more cells than carrier() shows"
#endif
  od
}

// --- ranks ---

#define RUNNING 0
#define GIVEN_UP 1  // by all ranks; calls that are queued are given up, too
#define BROKEN 2    // a peer did not come
byte stopped[N];
byte broken_in[N];  // the call in which it became BROKEN

#define BREAK_OFF        \
  stopped[me] = BROKEN;  \
  broken_in[me] = e
// In calls that were queued behind that one the rank writes nothing ahead of its peers' words; its
// own word refuses the first of them, and none comes of the others.
#define IS_BEHIND (stopped[me] == BROKEN && broken_in[me] != e)
#ifdef NEVER_SILENT
#define IS_SILENT false
#else
#define IS_SILENT (IS_BEHIND && e - broken_in[me] > 1)
#endif

#define COMES(rank) (stopped[rank] != BROKEN && !has_ended[rank])
#define MAY_EXPIRE (is_halted || is_dead || !ALL_OF(COMES))

// --- a call ---

#define REFUSED 128  // added to what a word says
#ifdef ONE_WORD_AREA
#define PLACE_OF_WORD(e) 0
#elif defined(ONE_SECOND_AREA)
#define PLACE_OF_WORD(e) (is_second -> 0 : (e) % 2)
#else
#define PLACE_OF_WORD(e) ((e) % 2)
#endif
#ifdef SECOND_IN_PLACE
#define FIRST_OF_WORDS 0
#else
#define FIRST_OF_WORDS (2 * is_second)
#endif
#define WORD(e, owner, writer) CELL(FIRST_OF_WORDS + PLACE_OF_WORD(e), owner, writer)
#define WORD_SIGNAL(e, owner, writer) SIGNAL(2 * is_second + (e) % 2, owner, writer)
#define HAS_WORD(peer) ((peer) == me || WORD_SIGNAL(e, me, peer) >= e)

#ifdef NO_WORD_WAIT
#define HAS_ALL_WORDS true
#elif defined(NO_SECOND_WAIT)
#define HAS_ALL_WORDS (is_second || ALL_OF(HAS_WORD))
#else
#define HAS_ALL_WORDS ALL_OF(HAS_WORD)
#endif
// A model may look at the number in a word, too.
#ifndef IS_RIGHT_NUMBER
#define IS_RIGHT_NUMBER(number) true
#endif

// The variables of a rank.
#define RANK_STATE \
  byte e;          \
  byte peer;       \
  byte said;       \
  bool is_good;    \
  bool is_second;  \
  bool has_told;   \
  bool has_pushed

// The next call. is_good: this rank runs it, as far as it knows (set_own_word).
inline begin_call() {
  if
  :: stopped[me] == GIVEN_UP -> stopped[me] = RUNNING  // the host has cleared the fault
  :: true
  fi;
  e++;
  is_good = stopped[me] == RUNNING;
  is_second = false;
  if
  :: is_good && MAY_REFUSE -> num_refusals++; refuser[e] = me; is_good = false
  :: true
  fi
}

// This rank's handshake, but for its signals. `number` travels with it.
inline store_words(number) {
  said = e + 8 * number;
  if
  :: !is_good -> said = said + REFUSED
  :: else
  fi;
  if
  :: !IS_SILENT -> FOR_PEERS(store(WORD(e, peer, me), said))
  :: else
  fi;
  said = 0;
  has_told = IS_SILENT
}
inline raise_words() {
  d_step {
    !has_told && FENCE(WORDS, me) ->
    FOR_PEERS(WORD_SIGNAL(e, peer, me) = e);
    has_told = true
  }
}

// Mutation: the next call's words are sent before this call has read what came.
inline send_next_words(number) {
#ifdef WORD_BEFORE_END
  if
  :: is_good && e < C ->
     atomic {
       e++;
       store_words(number)
     };
     raise_words();
     e--
  :: else
  fi
#else
  skip
#endif
}

// accept_word(): the handshakes of all ranks. is_good: all of them run the call. A rank that is
// two calls ahead has written over its word of this call. Only one that has broken off may be, in
// the call between, and its word says so.
inline accept_words() {
  if
  :: stopped[me] == BROKEN -> is_good = false
#ifdef NO_WAIT_WHEN_GIVEN_UP
  :: !is_good
#endif
  :: stopped[me] != BROKEN && HAS_ALL_WORDS ->
     d_step {
       FOR_PEERS(
         said = visible[WORD(e, me, peer)];
         assert((said % 8 == e && IS_RIGHT_NUMBER(said % REFUSED / 8)) ||
                (said >= REFUSED && stopped[peer] == BROKEN && said % 8 == broken_in[peer] + 1));
         if
         :: said >= REFUSED -> is_good = false
         :: else
         fi
       );
       said = 0;
       if
       :: !is_good && refuser[e] != me -> stopped[me] = GIVEN_UP
       :: else
       fi
     }
  :: stopped[me] != BROKEN && !HAS_ALL_WORDS && MAY_EXPIRE ->
     d_step {
       is_good = false;
#ifdef EXPIRED_STAYS_GIVEN_UP
       if
       :: stopped[me] == GIVEN_UP
       :: else -> BREAK_OFF
       fi
#else
       BREAK_OFF
#endif
     }
  fi
}

// Whether a call of two halves goes on after its first (finish_half): unless all ranks give it up.
// A rank that has broken off alone goes on, so that its handshake tells the others.
#ifdef GOES_ON_WHEN_REFUSED
#define GOES_ON (refuser[e] != me)
#else
#define GOES_ON (refuser[e] != me && stopped[me] != GIVEN_UP)
#endif

// The wait for what follows the handshakes, and the step that takes it once it is there.
#define TAKE(is_there, body)                     \
  if                                             \
  :: !is_good                                    \
  :: is_good && (is_there) -> d_step { body }    \
  :: is_good && !(is_there) && MAY_EXPIRE ->     \
     d_step {                                    \
       is_good = false;                          \
       BREAK_OFF                                 \
     }                                           \
  fi

// The kernel ends.
inline end_call() {
  d_step {
    IS_SHOWN(WORDS, me) && IS_SHOWN(ROWS, me) && IS_SHOWN(LOOSE, me) ->
    is_good = false;
    has_told = false;
    has_pushed = false
  }
}
