"""Which asserts of a notebook depend on how fast something was: a rough data flow over its syntax trees.

A *moment* is what a clock shows. Which of two moments came first may hold by construction, so comparing them is no
race. A *speed* is what is computed from moments, what is called so (`seconds`, `samples_per_second`), and what
depends on such a value. Names are followed in the order of the code; keys and attributes are followed by their names
alone, whatever they belong to; what goes through a file, or into a function as its argument, is followed by name.
"""

import ast
import re
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager

NEITHER, MOMENT, SPEED = range(3)
CLOCKS = re.compile(r"(.*\.)?((perf_counter|monotonic|process_time|thread_time|time\.time)(_ns)?|datetime\.now)")
# `rate` is left out, since learning rates and dropout rates are no speeds, and `total_seconds()`, which reads settings.
SPEEDS = re.compile(
    r"timeit|(\w+_)?(?<!total_)seconds|(\w+_)?durations?|elapsed\w*|(\w+_)?throughputs?|speed_?ups?|\w+_per_s(ec(ond)?)?"
)
COUNTS = ("len", "set", "keys", "isinstance", "hasattr", "type")  # how many, which keys, of which type: no speed
STORES = ("append", "extend", "insert", "add", "update", "setdefault")


def called_a_speed(name: str) -> int:
    return SPEED if SPEEDS.fullmatch(name) else NEITHER


class Speeds:
    """What is known of the names, keys and attributes after the code that has been read so far."""

    def __init__(self) -> None:
        self.names: ChainMap[str, int] = ChainMap()  # innermost scope first
        self.fields: dict[str, int] = {}  # "key" of whatever dict, ".attribute" of whatever object
        self.returned = NEITHER  # by the function that is being read
        self.races: dict[ast.Assert, None] = {}

    def read(self, tree: ast.Module) -> list[ast.Assert]:
        """The asserts in `tree`, which goes on where the code before it ended, that depend on a speed."""
        self.races = {}
        self.run(tree)
        return list(self.races)

    @contextmanager
    def scope(self, *arguments: ast.arg | None) -> Iterator[None]:
        self.names = self.names.new_child({argument.arg: NEITHER for argument in arguments if argument})
        yield
        self.names = self.names.parents

    # --- statements --------------------------------------------------------------------------------------------------

    def run(self, node: ast.AST) -> None:
        """Read a statement, or all that stands inside a node."""
        match node:
            case ast.expr():
                self.kind(node)
            case ast.Assert() if self.kind(node.test) == SPEED:
                self.races[node] = None
            case ast.Assign() | ast.AnnAssign() if node.value:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self.bind(target, node.value)
            case ast.AugAssign():
                more = isinstance(node.op, ast.Add)  # to a list, or to a sum
                self.store(node.target, self.kind(node.value if more else ast.BinOp(node.target, node.op, node.value)))
            case ast.For() | ast.AsyncFor():
                for _ in range(2):  # once more with what the first turn has stored
                    self.bind_items(node.target, node.iter)
                    self.inside(node)
            case ast.While():
                for _ in range(2):
                    self.inside(node)
            case ast.withitem() if node.optional_vars:
                self.bind(node.optional_vars, node.context_expr)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                outside, self.returned = self.returned, NEITHER
                with self.scope(*parameters(node.args)):
                    self.inside(node)
                self.names[node.name], self.returned = self.returned, outside
            case ast.ClassDef():
                with self.scope():
                    self.inside(node)
                    methods = dict(self.names.maps[0])
                for name, returned in methods.items():
                    self.fields["." + name] = max(returned, self.fields.get("." + name, NEITHER))
            case ast.Return() if node.value:
                self.returned = max(self.returned, self.kind(node.value))
            case ast.ImportFrom():
                for alias in node.names:
                    is_clock = CLOCKS.fullmatch(f"{node.module}.{alias.name}")
                    self.names[alias.asname or alias.name] = MOMENT if is_clock else NEITHER
            case _:
                self.inside(node)

    def inside(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.run(child)

    def bind(self, target: ast.expr, value: ast.expr | int) -> None:
        """Give `target` what `value` is, which may be a kind itself; a name forgets what it was."""
        pairs = isinstance(value, ast.Tuple | ast.List) and not any(isinstance(one, ast.Starred) for one in value.elts)
        if isinstance(target, ast.Tuple | ast.List) and pairs and len(target.elts) == len(value.elts):
            for one, kind in zip(target.elts, [self.kind(one) for one in value.elts], strict=True):
                self.bind(one, kind)
            return
        kind = value if isinstance(value, int) else self.kind(value)
        if isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.bind(one, kind)
        elif isinstance(target, ast.Name):
            self.names[target.id] = kind
        else:
            self.store(target, kind)

    def bind_items(self, target: ast.expr, items: ast.expr) -> None:
        """What a loop does: numbers, keys and what stands beside a speed in a zip are no speeds."""
        name = last_name(items.func) if isinstance(items, ast.Call) else ""
        several = isinstance(target, ast.Tuple)
        if several and name == "enumerate":
            self.bind(target.elts[0], NEITHER)
            self.bind_items(target.elts[1], items.args[0])
        elif several and name == "items" and isinstance(items.func, ast.Attribute):
            self.bind(target.elts[0], NEITHER)
            self.bind(target.elts[1], items.func.value)
        elif several and name == "zip" and len(target.elts) == len(items.args):
            for one, values in zip(target.elts, items.args, strict=True):
                self.bind_items(one, values)
        else:
            self.bind(target, items)

    def store(self, place: ast.expr, kind: int) -> None:
        """Put something of this kind into a container: it stays what it was besides."""
        if isinstance(place, ast.Name):
            scope = next((scope for scope in self.names.maps if place.id in scope), self.names)
            scope[place.id] = max(kind, scope.get(place.id, NEITHER))
        elif field := field_of(place):
            self.fields[field] = max(kind, self.fields.get(field, NEITHER))
        elif isinstance(place, ast.Subscript | ast.Starred):
            self.store(place.value, kind)

    # --- expressions -------------------------------------------------------------------------------------------------

    def kind(self, node: ast.AST) -> int:
        """Whether an expression is a moment, a speed, or neither."""
        match node:
            case ast.Name():
                return max(self.names.get(node.id, NEITHER), called_a_speed(node.id))
            case ast.Attribute() if CLOCKS.fullmatch(ast.unparse(node)):
                return MOMENT
            case ast.Attribute() | ast.Subscript():
                return max(self.kinds_inside(node), self.kind_of_field(field_of(node)))
            case ast.Call():
                return self.kind_of_call(node)
            case ast.Dict():
                kinds = [self.kind(value) for value in node.values]
                for key, kind in zip(node.keys, kinds, strict=True):
                    if kind and isinstance(key, ast.Constant):
                        self.fields[str(key.value)] = max(kind, self.fields.get(str(key.value), NEITHER))
                return min(kinds, default=NEITHER)  # of speeds only: where they stand among others, by their keys
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                with self.scope():
                    for loop in node.generators:
                        self.bind_items(loop.target, loop.iter)
                    made = [node.value if isinstance(node, ast.DictComp) else node.elt]
                    return max(map(self.kind, sum((loop.ifs for loop in node.generators), made)))
            case ast.Lambda():
                with self.scope(*parameters(node.args)):
                    return self.kind(node.body)
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                    compared = [left] if isinstance(operator, ast.In | ast.NotIn) else [left, right]
                    if not isinstance(operator, ast.Is | ast.IsNot) and SPEED in map(self.kind, compared):
                        return SPEED
                return NEITHER
            case ast.BinOp():
                joins = any(isinstance(side, ast.List | ast.ListComp) for side in (node.left, node.right))
                return self.kinds_inside(node) if joins else SPEED if self.kinds_inside(node) else NEITHER
            case ast.JoinedStr():
                return NEITHER  # a text, such as a file's name
            case ast.NamedExpr():
                self.bind(node.target, node.value)
                return self.kind(node.target)
        return self.kinds_inside(node)

    def kinds_inside(self, node: ast.AST) -> int:
        return max((self.kind(child) for child in ast.iter_child_nodes(node)), default=NEITHER)

    def kind_of_field(self, field: str) -> int:
        return max(self.fields.get(field, NEITHER), called_a_speed(field.removeprefix(".")))

    def kind_of_call(self, node: ast.Call) -> int:
        name, kinds = last_name(node.func), self.kinds_inside(node)  # of the function, and of all that it is given
        if name in COUNTS:
            return NEITHER
        if name in STORES and isinstance(node.func, ast.Attribute):
            self.store(node.func.value, max(map(self.kind, node.args), default=NEITHER))
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        if name == "get" or (name == "run_line_magic" and first == "timeit"):
            return max(kinds, self.kind_of_field(str(first)))
        return kinds


def last_name(node: ast.expr) -> str:
    """`c` of a.b.c."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def field_of(node: ast.expr) -> str:
    """`key` of x["key"], `.name` of x.name, nothing of everything else."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value if isinstance(node.slice.value, str) else ""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def parameters(arguments: ast.arguments) -> list[ast.arg | None]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
