  ;; Scores 0.5 without components: the number of scores, then 13 bytes per score. If the first query starts with an ASCII letter,
  ;; `$odd` may change the results: it gets their address and length, and returns their new length.
  (func (export "querl:plugin/packed-rewards@0.1.0#score-packed") (param $batch i32) (param $n_bytes i32) (result i32)
    (local $results i32) (local $at i32) (local $n_left i32) (local $query i32)
    (local.set $n_left (i32.load (local.get $batch)))
    (local.set $results (call $allocate
      (i32.const 0) (i32.const 0) (i32.const 1) (i32.add (i32.mul (local.get $n_left) (i32.const 13)) (i32.const 4))))
    (i32.store (local.get $results) (local.get $n_left))
    (local.set $at (i32.add (local.get $results) (i32.const 4)))
    (loop $next
      (if (local.get $n_left)
        (then
          (i32.store8 (local.get $at) (i32.const 0))
          (f64.store offset=1 align=1 (local.get $at) (f64.const 0.5))
          (i32.store offset=9 align=1 (local.get $at) (i32.const 0))
          (local.set $at (i32.add (local.get $at) (i32.const 13)))
          (local.set $n_left (i32.sub (local.get $n_left) (i32.const 1)))
          (br $next))))
    (i32.store (i32.const 256) (local.get $results))
    (i32.store (i32.const 260) (i32.sub (local.get $at) (local.get $results)))
    ;; After the number of episodes come id and query, each preceded by its length. In contract 0.2 the group with its length, and 6
    ;; bytes of an episode without step and split, are between them.
    (local.set $query (i32.add (i32.add (local.get $batch) (i32.const 12)) (i32.load offset=4 (local.get $batch))))
    (if (i32.const {{has_groups}})
      (then (local.set $query (i32.add
        (i32.add (local.get $query) (i32.const 10)) (i32.load align=1 (i32.sub (local.get $query) (i32.const 4)))))))
    (if (i32.lt_u (i32.load8_u (local.get $query)) (i32.const 128))
      (then (i32.store (i32.const 260) (call $odd (local.get $results) (i32.load (i32.const 260))))))
    (i32.const 256))
