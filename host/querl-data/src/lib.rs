//! Tables, teacher, judge, retrieval and datasets
