"""Between the bindings and the authors' classes. Runs in components only; `querl plugin build` makes the module that uses it.

componentize-py writes the bindings (`wit_world`, `componentize_py_types`) for the worlds of `plugin.toml`, and calls classes by
the names of the exported interfaces: one module here for each.
"""
