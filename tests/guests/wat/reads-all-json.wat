;; Scores 0.5 and declares every input: for measuring the cost of complete episodes as JSON.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/json-rewards@0.1.0;
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
  (data (i32.const 1500) "{\22scored\22:{\22total\22:0.5,\22components\22:[]}},")
  ;; One result for each occurrence of `"query":` in the batch.
  (func (export "querl:plugin/json-rewards@0.1.0#score-json") (param $at i32) (param $n_bytes i32) (result i32)
    (local $end i32) (local $results i32) (local $to i32)
    (local.set $end (i32.sub (i32.add (local.get $at) (local.get $n_bytes)) (i32.const 8)))
    (local.set $results (call $allocate (i32.const 0) (i32.const 0) (i32.const 1) (local.get $n_bytes)))
    (i32.store8 (local.get $results) (i32.const 91))
    (local.set $to (i32.add (local.get $results) (i32.const 1)))
    (loop $next
      ;; The bytes `"query":` as an integer.
      (if (i64.eq (i64.load align=1 (local.get $at)) (i64.const 0x3a22797265757122))
        (then
          (memory.copy (local.get $to) (i32.const 1500) (i32.const 41))
          (local.set $to (i32.add (local.get $to) (i32.const 41)))))
      (local.set $at (i32.add (local.get $at) (i32.const 1)))
      (br_if $next (i32.lt_u (local.get $at) (local.get $end))))
    (i32.store8 (i32.sub (local.get $to) (i32.const 1)) (i32.const 93))
    (i32.store (i32.const 256) (local.get $results))
    (i32.store (i32.const 260) (i32.sub (local.get $to) (local.get $results)))
    (i32.const 256))
)
