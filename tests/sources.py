"""The statements of source files, for tests that look at how the package is written."""

import ast

ENTERED = ast.stmt | ast.ExceptHandler | ast.match_case


def statements(tree):
    """Yield all statements of a tree, with handlers of exceptions; expressions, most of the nodes, are not entered."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, ENTERED)]
