package penstock

import org.apache.spark.sql.SparkSessionExtensions
import org.apache.spark.sql.catalyst.FunctionIdentifier
import org.apache.spark.sql.catalyst.expressions.{Expression, ExpressionInfo, Literal}
import org.apache.spark.sql.types.LongType

/** Gives every session of a Spark our functions. Named by the setting `spark.sql.extensions`. */
class Functions extends (SparkSessionExtensions => Unit) {
  def apply(extensions: SparkSessionExtensions): Unit = {
    register(extensions, "penstock_lags", classOf[CountByLag]) { case Seq(lag) => CountByLag(lag) }
    register(extensions, "penstock_moment", classOf[Moment]) { case Seq(millis) => Moment(millis) }
    register(extensions, "penstock_origins", classOf[CollectOrigins]) {
      case Seq(headers) => CollectOrigins(headers, Literal(null, LongType))
      case Seq(headers, minute) => CollectOrigins(headers, minute)
    }
  }

  private def register(extensions: SparkSessionExtensions, name: String, made: Class[_])(
      make: PartialFunction[Seq[Expression], Expression]
  ): Unit = {
    def refuse(arguments: Seq[Expression]) =
      throw new IllegalArgumentException(s"$name does not take ${arguments.size} arguments")
    val info = new ExpressionInfo(made.getName, name)
    extensions.injectFunction((FunctionIdentifier(name), info, make.applyOrElse(_, refuse)))
  }
}
