  ;; Scores 0.5 without components. For an episode ({{episode_bytes}} bytes) whose query, at {{query}}, starts with an ASCII letter, calls
  ;; `$odd` with the address of the result (24 bytes: tag at 0, total or rejection at 8, components at 16).
  (func (export "{{score}}") (param $episodes i32) (param $n_episodes i32) (result i32)
    (local $results i32) (local $result i32) (local $index i32)
    (local.set $results (call $allocate
      (i32.const 0) (i32.const 0) (i32.const 8) (i32.mul (local.get $n_episodes) (i32.const 24))))
    (loop $next
      (if (i32.lt_u (local.get $index) (local.get $n_episodes))
        (then
          (local.set $result (i32.add (local.get $results) (i32.mul (local.get $index) (i32.const 24))))
          (i32.store (local.get $result) (i32.const 0))
          (f64.store offset=8 (local.get $result) (f64.const 0.5))
          (i64.store offset=16 (local.get $result) (i64.const 0))
          (if (i32.load offset={{query_bytes}} (local.get $episodes))
            (then (if (i32.lt_u (i32.load8_u (i32.load offset={{query}} (local.get $episodes))) (i32.const 128))
              (then (call $odd (local.get $result))))))
          (local.set $episodes (i32.add (local.get $episodes) (i32.const {{episode_bytes}})))
          (local.set $index (i32.add (local.get $index) (i32.const 1)))
          (br $next))))
    (i32.store (i32.const 256) (local.get $results))
    (i32.store (i32.const 260) (local.get $n_episodes))
    (i32.const 256))
