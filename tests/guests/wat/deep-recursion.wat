;; Endless recursion.
(module
  ;;! include reward

  (func $odd (param $depth i32)
    (call $odd (i32.add (local.get $depth) (i32.const 1)))
    ;; Not a tail call, so that the stack frames remain.
    (i32.store (i32.const 512) (local.get $depth)))
)
