"""Answers that cheat, each as the source of a submission: how they try to get points, and what the verdict must say."""

ALL_REDUCE = "04.ring_all_reduce"

# Right, with more bytes than our solution; what follows it tries to hide them.
NAIVE = """
import numpy as np

def naive(comm, array):
    n, r, total, incoming = comm.size, comm.rank, array.copy(), np.empty_like(array)
    for d in range(1, n):
        comm.sendrecv(array.copy(), (r + d) % n, incoming, (r - d) % n)
        total += incoming
    array[...] = total
"""

# Ranks that add up what all have put into `board`: `place` says where that is.
BOARD = (
    NAIVE
    + """
def ring_all_reduce(comm, array{default}):
    {place}
    comm.barrier()
    board[comm.rank] = array.copy()
    comm.barrier()
    total = np.sum([board[rank] for rank in range(comm.size)], axis=0)
    comm.barrier()
    array[...] = total
"""
)

# The channel to the judge, as the garbage collector finds it.
CHANNEL = """
import gc, os, pickle
import numpy as np

def channel():
    return next(o for o in gc.get_objects() if type(o).__name__ == "Channel")

class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)
"""

BY_MESSAGES = "did not get the others' numbers by messages"
WRONG = "got ["
ENDLESS = STILL, LONG = "the run was still going on after", "for more than"
CHEATS = {}  # name -> (exercise, source, words of the verdict)


def cheat(name, source, words, exercise=ALL_REDUCE):
    assert name not in CHEATS
    CHEATS[name] = exercise, source, words


def board(name, place, words=BY_MESSAGES, default=""):
    cheat(name, BOARD.format(place=place, default=default), words)


# ranks that share something else than messages ------------------------------------------------------------------------

cheat("a global", "board = {}\n" + BOARD.format(place="", default=""), "ranks communicate through 'board'")
board("a default argument", "", "default argument", ", board={}")
board("the function", "board = ring_all_reduce.__dict__.setdefault('board', {})", "ranks communicate through")
board("the dictionary of a module", "import math; board = math.__dict__")
board("an attribute of numpy", "board = np.__dict__.setdefault('board', {})")
board("builtins", "import builtins; board = vars(builtins).setdefault('board', {})")
board("sys.modules", "import sys; board = sys.modules")
board("the world", "board = vars(comm.world).setdefault('board', {})")
board("a class of the library", "kind = type(comm); kind.board = board = getattr(kind, 'board', {})")
cheat(
    "files",
    NAIVE
    + """
def ring_all_reduce(comm, array):
    np.save(f"{comm.rank}.npy", array)
    comm.barrier()
    total = np.sum([np.load(f"{rank}.npy") for rank in range(comm.size)], axis=0)
    comm.barrier()
    array[...] = total
""",
    BY_MESSAGES,
)
cheat(
    "the environment",
    NAIVE
    + """
import os
def ring_all_reduce(comm, array):
    os.environ[f"RANK{comm.rank}"] = array.tobytes().hex()
    comm.barrier()
    parts = [np.frombuffer(bytes.fromhex(os.environ[f"RANK{rank}"])) for rank in range(comm.size)]
    comm.barrier()
    array[...] = np.sum(parts, axis=0) if array.size else array
""",
    BY_MESSAGES,
)
cheat(
    "inputs of the other ranks in a frame",
    """
import pickle, sys
def ring_all_reduce(comm, array):
    frame = sys._getframe()
    while "question" not in frame.f_locals:
        frame = frame.f_back
    array[...] = sum(pickle.loads(data)[0] for data in frame.f_locals["question"].inputs)
""",
    BY_MESSAGES,
)
cheat(
    "messages that are not counted",
    NAIVE
    + """
def ring_all_reduce(comm, array):
    kind = type(comm.world.matching)
    kind.post = kind.__mro__[1].post
    comm.world.post = comm.world.matching.post
    naive(comm, array)
""",
    BY_MESSAGES,
)
cheat(
    "a world within the world",
    """
import numpy as np
from minidist import SimWorld
def ring_all_reduce(comm, array):
    def inner(other):
        total = array.copy()
        if other.size > 1:
            incoming = np.empty_like(array)
            other.sendrecv(array.copy(), 1 - other.rank, incoming, 1 - other.rank)
            total += incoming
        return total
    array[...] = SimWorld(min(2, comm.size)).run(inner)[0]
""",
    WRONG,
)
cheat(
    "waits by a clock",
    """
def in_rank_order(comm, say):
    comm.compute(seconds=2e-3 * comm.rank)
    say("x")
""",
    BY_MESSAGES,
    "00.in_rank_order",
)
cheat(
    "a flag that ranks share",
    """
import math
import numpy as np
def scaled_training(comm, steps, backward, step):
    scale, good = 2.0**16, 0
    for number in range(steps):
        scaled = backward(scale)
        flags = vars(math).setdefault("flags", {})
        flags[comm.rank] = bool(np.isfinite(scaled).all())
        comm.barrier()
        fine = all(flags[rank] for rank in range(comm.size))
        comm.barrier()
        if not fine:
            scale, good = scale / 2, 0
            continue
        step(scaled.astype(np.float32) / np.float32(scale))
        good += 1
        if good == 3:
            scale, good = scale * 2, 0
    return scale
""",
    BY_MESSAGES,
    "09.scaled_training",
)

# what is expected -----------------------------------------------------------------------------------------------------

cheat(
    "a case in a frame",
    """
import sys
def ring_all_reduce(comm, array):
    frame, found = sys._getframe(), []
    while frame is not None:
        found += [v for v in frame.f_locals.values() if type(v).__name__ in ("Case", "Exercise", "Generator")]
        frame = frame.f_back
    array[...] = found[0].expected(found[0])[comm.rank]
""",
    "IndexError",
)
cheat(
    "a case in memory",
    """
import gc
def ring_all_reduce(comm, array):
    found = [o for o in gc.get_objects() if type(o).__name__ in ("Case", "Exercise", "Request")]
    array[...] = found[0].seed
""",
    "IndexError",
)
cheat(
    "an exercise's function in memory",
    """
import gc
def ring_all_reduce(comm, array):
    found = [o for o in gc.get_objects() if "minidist.course.lesson.exercises" in str(getattr(o, "__module__", ""))]
    found = [o for o in found if getattr(o, "__name__", "") != "<lambda>"]
    array[...] = found[0].seed
""",
    "IndexError",
)
for module in ("exercises.e04_ring_all_reduce", "exercises", "assignments.cs336", "puzzles.messages"):
    cheat(
        f"import of {module}",
        f"""
def ring_all_reduce(comm, array):
    import minidist.course.lesson.{module}
    array[...] = minidist.course.lesson.{module}.total(None)
""",
        "belongs to the judge",
    )
cheat(
    "the table of exercises",
    """
from minidist.course.lesson.catalogue import exercises
def ring_all_reduce(comm, array):
    array[...] = exercises()["04.ring_all_reduce"].expected(None)
""",
    "belongs to the judge",
)
cheat(
    "an exercise that is imported after all, on each case that it has",
    """
import sys
import numpy as np
def ring_all_reduce(comm, array):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_NoExercises"]
    from minidist.course.lesson.exercises.e04_ring_all_reduce import EXERCISES, data, total
    cases = [case for case in (*EXERCISES[0].cases(), *EXERCISES[0].pool()) if case.ranks == comm.size]
    case = next(case for case in cases if np.array_equal(data(case, comm.rank), array))
    array[...] = total(case)[comm.rank]
""",
    BY_MESSAGES,
)
cheat(
    "the seed in the environment",
    "import os\ndef ring_all_reduce(comm, array):\n    array[...] = int(os.environ['MINIDIST_LESSON_SEED'])",
    "KeyError",
)
cheat(
    "the solution",
    "from minidist.course.lesson import solution\ndef ring_all_reduce(comm, array):\n"
    "    solution('04.ring_all_reduce')(comm, array)",
    "asks you to write",
)
cheat(
    "what the judge has written",
    "def ring_all_reduce(comm, array):\n    array[...] = len(open('results.json').read())",
    "FileNotFoundError",
)

# the comparison -------------------------------------------------------------------------------------------------------

for name, patch in {
    "numpy's comparisons": "np.array_equal = np.allclose = np.isclose = lambda *a, **k: True",
    "the exercise's comparison": "import minidist.course.lesson.exercise as e; e.difference = lambda *a: ''",
    "the judge": "import minidist.course.lesson.judge as j; j.find_failure = lambda *a: None",
    "the clocks": "import time; time.time = time.monotonic = time.perf_counter = lambda: 0.0",
    "standard output": "import os, sys; sys.stdout.close(); sys.stderr.close(); os.closerange(0, 3)",
    "a handler of signals": "import signal; [signal.signal(s, signal.SIG_IGN) for s in (2, 10, 12, 15)]",
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
    "a trace function": "import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
    "the folder": "import os; os.chdir('/')",
}.items():
    cheat(
        f"patches {name}",
        f"import numpy as np\ndef ring_all_reduce(comm, array):\n    {patch}\n    array += comm.size",
        WRONG,
    )
cheat(
    "an array that equals everything",
    """
import numpy as np
class Equal(np.ndarray):
    def __eq__(self, other):
        return np.ones(self.shape, bool)
    def __array_function__(self, *a, **k):
        return True
def by_sendrecv(comm, outgoing):
    return (outgoing + 1).view(Equal)
""",
    WRONG,
    "03.by_sendrecv",
)
cheat(
    "objects that equal everything",
    """
class Equal:
    def __eq__(self, other):
        return True
    def __hash__(self):
        return 0
def gpipe(p, m):
    return [[Equal()] * 2 * m] * p
""",
    "",
    "16.gpipe",
)
cheat(
    "a text that is code when it is pickled",
    CHANNEL
    + """
class Text(str):
    def __reduce__(self):
        return Evil().__reduce__()
class Loud(Exception):
    def __str__(self):
        return Text("loud")
def ring_all_reduce(comm, array):
    raise Loud
""",
    "Loud: loud",
)
cheat(
    "a list that is code when it is pickled",
    CHANNEL
    + """
class Values(list):
    def __reduce_ex__(self, protocol):
        return Evil().__reduce__()
def gpipe(p, m):
    return Values([["F0"]])
""",
    "",
    "16.gpipe",
)

# what goes to the judge -----------------------------------------------------------------------------------------------

NO_OUTCOME = "is no outcome of a run"
for name, sent, words in (
    ("code", "channel().send(pickle.dumps(Evil()))", NO_OUTCOME),
    ("a pickle of protocol 0", "channel().send(pickle.dumps(Evil(), 0))", NO_OUTCOME),
    ("no table", "channel().send(pickle.dumps([1, 2], 4))", NO_OUTCOME),
    ("an empty table", "channel().send(pickle.dumps({}, 4))", NO_OUTCOME),
    ("other types", "channel().send(pickle.dumps({'answers': 3, 'message': b''}, 4))", NO_OUTCOME),
    ("bytes of no frame", "channel().socket.sendall(b'\\xff' * 64)", NO_OUTCOME),
    ("half a frame", "channel().socket.sendall((1 << 20).to_bytes(8, 'little')); time.sleep(60)", STILL),
    ("records without end", "[channel().socket.sendall(bytes(8)) for _ in range(10**9)]", "is no outcome"),
    ("a record of a rank there is not", "channel().send(b'm' + bytes(3) + b'\\xff' * 12 + bytes(8))", NO_OUTCOME),
    ("a made-up outcome", "channel().send(pickle.dumps({'answers': [None] * comm.size}, 4))", "returned None"),
    (
        "lists in lists without end",
        "channel().send(b'\\x80\\x04}(\\x8c\\x07answers' + b']' * 10**5 + b'a' * (10**5 - 1) + b'u.')",
        "20 deep in others",
    ),
    (
        "a message of a million letters",
        "channel().send(pickle.dumps({'error': ['x'], 'message': 'x' * 10**6}, 4))",
        "xxx",
    ),
    ("nothing any more", "os.closerange(3, 256)", "the process that ran the function ended"),
):
    cheat(f"sends {name}", CHANNEL + f"import time\ndef ring_all_reduce(comm, array):\n    {sent}\n", words)
cheat(
    "another function pack",
    "def ring_all_reduce(comm, array):\n    from minidist.course.lesson import answer_process as a\n"
    "    a.pack = lambda v: b'x'",
    NO_OUTCOME,
)
cheat(
    "bytes that are taken back",
    CHANNEL
    + NAIVE
    + """
def ring_all_reduce(comm, array):
    from minidist.course.lesson.answer_process import RECORD
    naive(comm, array)
    channel().send(RECORD.pack(b"m", comm.rank, -8, 0.0))
""",
    NO_OUTCOME,
)
cheat(
    "a clock that is set back",
    NAIVE
    + """
def ring_all_reduce(comm, array):
    naive(comm, array)
    for stream in comm.world.state.mains:
        stream.time = 0.0
""",
    "its messages take at least",
)
cheat(
    "links that cost nothing",
    NAIVE
    + """
def ring_all_reduce(comm, array):
    for name in ("alpha", "beta"):
        setattr(comm.world.matching, name, 0.0)
    naive(comm, array)
""",
    "its messages take at least",
)

# the process ----------------------------------------------------------------------------------------------------------

ENDED = "the process that ran the function ended"
for name, end, words in (
    ("exits", "import os; os._exit(0)", ENDED + ", with exit code 0"),
    ("kills itself", "import os; os.kill(os.getpid(), 9)", ENDED + ", with exit code -9"),
    ("kills its group", "import os, time; os.killpg(0, 9); time.sleep(60)", ENDED),
    ("kills its parent", "import os, time; os.kill(os.getppid(), 9); time.sleep(60)", ENDED),
    ("ends the program", "raise SystemExit(0)", "the function ended the program"),
    ("calls itself without end", "ring_all_reduce(comm, array)", "RecursionError"),
    ("takes all memory", "bytearray(1 << 36)", "MemoryError"),
    ("sleeps", "import time; time.sleep(60)", LONG),
    ("sleeps without interrupts", "import signal, time; signal.pthread_sigmask(0, [2]); time.sleep(60)", STILL),
):
    cheat(name, f"def ring_all_reduce(comm, array):\n    {end}", words)

# Right answers that try to hide bytes above par.
HIDDEN = {
    "clears the trace": "comm.trace.messages.clear()",
    "clears all traces": "[trace.messages.clear() for trace in comm.world.traces]",
    "replaces the traces": "comm.world.state.traces = [type(t)() for t in comm.world.state.traces]",
    "clears every list of events": "import gc; comm.rank or [o.clear() for o in gc.get_objects() if type(o) is list"
    " and o and type(o[0]).__name__ == 'MessageEvent']",
}
