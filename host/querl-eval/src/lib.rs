//! Metrics, comparison and report
