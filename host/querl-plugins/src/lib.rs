//! The host for WebAssembly plugins
