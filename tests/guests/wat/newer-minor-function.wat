;; Calls a function that was added in a later 0.1.x.
;;! contract 0.1.7
;;! adds log flush: func();
(module
  (import "querl:plugin/log@0.1.0" "flush" (func $flush))
  ;;! include reward
  (func $odd (param i32)
    (call $flush))
)
