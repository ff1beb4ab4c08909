"""Connects the generated bindings to the plugin's classes. Runs in components only, imported by a module that `querl plugin build` writes.

componentize-py generates the bindings (`wit_world`, `componentize_py_types`) for the worlds of `plugin.toml`. It calls one class
per exported interface; each has a module here.
"""
