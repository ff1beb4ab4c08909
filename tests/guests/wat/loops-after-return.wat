;; Loops in the function that frees a result, if the first query starts with an ASCII letter.
(module
  ;;! include reward
  (global $was_odd (mut i32) (i32.const 0))
  (func $odd (param i32)
    (global.set $was_odd (i32.const 1)))
  (func (export "cabi_post_querl:plugin/rewards@0.1.0#score-batch") (param i32)
    (loop $again
      (br_if $again (global.get $was_odd))))
)
