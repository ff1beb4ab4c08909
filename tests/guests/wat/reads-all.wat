;; Scores 0.5 and declares every input: for measuring the cost of complete episodes.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/packed-rewards@0.1.0;
(module
  ;;! include reward
  (func $odd (param i32))
  ;; List of all inputs; an input is a variant of 12 bytes and a flag.
  (func $describe_odd
    (local $n i32)
    (i32.store (i32.const 120) (i32.const 2048))
    (i32.store (i32.const 124) (i32.const 7))
    (loop $next
      (i32.store (i32.add (i32.const 2048) (i32.mul (local.get $n) (i32.const 16))) (local.get $n))
      (local.set $n (i32.add (local.get $n) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $n) (i32.const 7)))))
  (func (export "querl:plugin/packed-rewards@0.1.0#score-packed") (param $batch i32) (param i32) (result i32)
    (local $results i32) (local $at i32) (local $n_left i32)
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
    (i32.const 256))
)
