"""Finds loops that do nothing in the source of a program: a rank in such a loop never gets anywhere. Pure."""

from __future__ import annotations

import ast

_IDLE = (
    *(ast.While, ast.If, ast.Pass, ast.Continue, ast.Break, ast.Expr),
    *(ast.Constant, ast.Name, ast.Compare, ast.BoolOp, ast.UnaryOp),
    *(ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop),
)
"""Nodes that call nothing and change nothing."""


def is_bare_loop(source: str, line: int) -> bool:
    """Whether the innermost loop around a line is a ``while`` whose test and body do nothing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.While, ast.For, ast.AsyncFor))
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    innermost = max(loops, key=lambda node: (node.lineno, node.col_offset), default=None)
    return innermost is not None and all(isinstance(node, _IDLE) for node in ast.walk(innermost))
