"""How modules import each other, also inside of functions and for types only."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("dynaspec", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "dynaspec.engine.engine" in imported["dynaspec.engine.build"]  # it has seen the modules
    TopologicalSorter(imported).prepare()  # raises an error that names the modules of a circle
